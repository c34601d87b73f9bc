"""Schedule of data movement and host computation, as frozen actions.

A schedule can be planned, printed and sized without a device. `offload/executor.py` runs it.

    kind      lane        from -> to        contents
    LOAD      disk in     disk -> host      states of a unit; parameters and activations have lanes of their own
    FETCH     copy in     host -> device    a new working copy, or a state that is updated on the device
    COMPUTE   host        host              an update, an accumulation, or the encoding of parameters (its own lane)
    EVICT     copy out    device -> host    a gradient, or a state that is updated on the host
    SPILL     disk out    host -> disk      states of a unit; activations have a lane of their own

Two rules define the order:
    lane    A lane is a queue, which takes the action that was started first. If that has an `order`, it takes the first
            by order that waits for no slot, if there is one. Disk lanes take a few actions at a time. Actions that
            forward and backward need next have lanes of their own, so that they do not queue behind updates.
    slot    An action waits for all earlier actions on its slots, in host memory or on disk.
An action never waits for one that was started later. Hence actions cannot deadlock, a slot has one user at a time, and
no action waits for one that a step leaves out (for a unit without gradients).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from dzero.hardware import format_bytes
from dzero.offload.memory_pool import aligned


class ActionKind(StrEnum):
    """Kind of an action."""

    LOAD = "LOAD"
    FETCH = "FETCH"
    COMPUTE = "COMPUTE"
    EVICT = "EVICT"
    SPILL = "SPILL"


APART = frozenset(
    {
        (ActionKind.LOAD, "param"),
        (ActionKind.COMPUTE, "encode"),
        (ActionKind.LOAD, "activation"),
        (ActionKind.SPILL, "activation"),
    }
)
"""Actions with lanes of their own: forward and backward need their results next."""


class ActionKey(NamedTuple):
    """Name of an action within a step; an action has the same key in every step."""

    kind: ActionKind
    what: str
    unit: str

    @property
    def lane(self) -> str:
        """Name of the action's lane."""
        return f"{self.kind} {self.what}" if (self.kind, self.what) in APART else str(self.kind)

    def __str__(self) -> str:
        return f"{self.kind} {self.what} {self.unit}"


@dataclass(frozen=True)
class BufferSlot:
    """Buffer of `count` bytes in host memory or on disk, for tensors of one kind of one unit at a time."""

    name: str
    count: int
    tier: str = "host"


@dataclass(frozen=True)
class OffloadAction:
    """One move or computation, the slots that it reads or writes, and its place among others that wait for no slot."""

    key: ActionKey
    slots: tuple[str, ...]
    order: int = 0

    def __str__(self) -> str:
        return f"{self.key.kind:<8} {self.key.what:<10} {self.key.unit:<16} {', '.join(self.slots)}"


@dataclass(frozen=True)
class OffloadSchedule:
    """Actions of a step in the order in which they are usually started, and the slots that they need.

    Raises:
        ValueError: Two actions have the same key, two slots have the same name, or an action uses an unknown slot.
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
        """Size in bytes of all slots in host memory, rounded as in the host memory pool."""
        return sum(aligned(slot.count) for slot in self.slots if slot.tier == "host")

    @property
    def disk_bytes(self) -> int:
        """Size in bytes of all slots on disk, in whole pages."""
        return sum(aligned(slot.count) for slot in self.slots if slot.tier == "disk")

    def lines(self) -> Iterator[str]:
        """Yield printable lines: every slot with its size, every action with its slots, and the totals."""
        for slot in self.slots:
            yield f"slot     {slot.name:<27} {format_bytes(slot.count)}"
        yield from map(str, self.actions)
        disk = f", {format_bytes(self.disk_bytes)} on disk" if self.disk_bytes else ""
        yield f"{len(self.actions)} actions a step, {format_bytes(self.host_bytes)} of host memory{disk}"
