"""What moves when, as small frozen actions: planned, printed and sized without a device, then run by `executor`.

    kind      lane        from -> to           meaning
    LOAD      disk in     disk -> host         states of a unit; parameters and activations, in lanes of their own
    FETCH     copy in     host -> device       the new working copy, or a state that is updated on the device
    COMPUTE   host        host                 an update, an accumulation
    EVICT     copy out    device -> host       a gradient, or a state that is updated on the host
    SPILL     disk out    host -> disk         the same; activations in a lane of their own

Two rules order everything:
    lane    actions of one kind are taken up in the order in which they were started; the next one when the last has
            ended, but to and from the disk as soon as its slots are free, a few at once. What forward and backward
            need next does not queue up behind updates: it has lanes of its own to and from the disk
    slot    an action waits for whoever used one of its slots, in host memory or on disk, before it
Both look only at what was started earlier, so nothing can wait in a circle, a slot has one user at a time, and nobody
waits for an action that a step left out (a unit without gradients).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dzero.hardware import format_bytes
from dzero.offload.memory_pool import aligned


class ActionKind(StrEnum):
    """What an action does."""

    LOAD = "LOAD"
    FETCH = "FETCH"
    COMPUTE = "COMPUTE"
    EVICT = "EVICT"
    SPILL = "SPILL"


APART = frozenset({(ActionKind.LOAD, "param"), (ActionKind.LOAD, "activation"), (ActionKind.SPILL, "activation")})
"""What the device waits for next: not behind other actions of its kind."""


class ActionKey(NamedTuple):
    """Names an action within a step, and those that repeat it."""

    kind: ActionKind
    what: str
    unit: str

    @property
    def lane(self) -> str:
        """Actions of one lane are taken up in the order in which they were started."""
        return f"{self.kind} {self.what}" if (self.kind, self.what) in APART else str(self.kind)

    def __str__(self) -> str:
        return f"{self.kind} {self.what} {self.unit}"


@dataclass(frozen=True)
class BufferSlot:
    """A place of `count` bytes in host memory or on disk, for one unit's tensors of one kind at a time."""

    name: str
    count: int
    tier: str = "host"


@dataclass(frozen=True)
class OffloadAction:
    """One move or computation, and the slots it reads or writes."""

    key: ActionKey
    slots: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.key.kind:<8} {self.key.what:<10} {self.key.unit:<16} {', '.join(self.slots)}"


@dataclass(frozen=True)
class OffloadSchedule:
    """The actions of a step in the order in which they are usually started, and the slots they need.

    Raises ValueError for two actions or slots of one name, and for an action on a slot that does not exist.
    """

    slots: tuple[BufferSlot, ...] = ()
    actions: tuple[OffloadAction, ...] = ()
    by_key: dict[ActionKey, OffloadAction] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_key", {action.key: action for action in self.actions})
        names = {slot.name for slot in self.slots}
        if len(self.by_key) != len(self.actions) or len(names) != len(self.slots):
            raise ValueError("two actions have one key, or two slots one name")
        for action in self.actions:
            if unknown := set(action.slots) - names:
                raise ValueError(f"{action.key}: no slot is called {sorted(unknown)}")

    @property
    def host_bytes(self) -> int:
        """Host memory of all slots there together, rounded as the arena rounds."""
        return sum(aligned(slot.count) for slot in self.slots if slot.tier == "host")

    @property
    def disk_bytes(self) -> int:
        """Scratch space of all slots together, in whole pages."""
        return sum(aligned(slot.count) for slot in self.slots if slot.tier == "disk")

    def lines(self) -> Iterator[str]:
        """For people: every slot with its size, every action with its slots."""
        for slot in self.slots:
            yield f"slot     {slot.name:<27} {format_bytes(slot.count)}"
        yield from map(str, self.actions)
        disk = f", {format_bytes(self.disk_bytes)} on disk" if self.disk_bytes else ""
        yield f"{len(self.actions)} actions a step, {format_bytes(self.host_bytes)} of host memory{disk}"
