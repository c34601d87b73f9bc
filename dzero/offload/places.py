"""From the table to places: which states of which parameters lie in host memory, in which slot, at which offset.

    slot              holds                                                there
    grad <unit>       gradients, laid out as FSDP2's reduced buffer        if that tier is host, or updated here
    master <unit>     fp32 masters or 16-bit remainders                    if their tier is host
    moments <unit>    both moments                                         if their tier is host
    work <unit>       new working copies on their way to the device        if updated here, but for fp32
    landing 0, 1      a later microbatch's gradients until they are added  if gradients accumulate here
    stage 0, 1        device moments while they are updated here           if only the master's tier is host
    undo <unit>       what an early update overwrites                      with overlap=backward, within its budget

A parameter is updated where its master lives; its moments and its gradient travel there if they live elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dzero.offload.pinned import aligned
from dzero.offload.schedule import Action, Key, Kind, Schedule, Slot
from dzero.zero.layout import Layout
from dzero.zero.shapes import ParamShape, UnitShape

Unit = TypeVar("Unit")
GRAIN_BYTES = 64
BLOCK_ELEMS = 256
TURNS = 2


@dataclass(frozen=True)
class Place:
    """`elems` elements of `dtype` in a slot, from `start_bytes` on."""

    slot: str
    start_bytes: int
    dtype: torch.dtype
    elems: int


class Places:
    """Of every trained parameter's states: which are on the host, and where. Pure: no memory is taken.

    moments: whether they need a place; else whoever updates keeps them.
    """

    def __init__(self, layout: Layout, units: Sequence[UnitShape], *, moments: bool = True) -> None:
        self.layout, self.units, self._moments = layout, units, moments
        trained = [param for unit in units for param in unit.params if param.trainable]
        rows = {"grad": layout.grad, "master": layout.master, "moments": layout.moments}
        self._host = {
            kind: _trailing(trained, row.fraction) if row.tier == "host" else frozenset[str]()
            for kind, row in rows.items()
        }
        self.at: dict[tuple[str, str], Place] = {}
        self._used: dict[tuple[str, str], int] = {}
        for turn, unit in enumerate(units):
            for param in unit.params:
                if param.trainable:
                    self._place(unit.name, turn % TURNS, param)
        self._place_undo()

    def on_host(self, kind: str, name: str) -> bool:
        """Whether a parameter's "grad", "master" or "moments" lie in host memory between their uses."""
        return name in self._host[kind]

    def updated_on_host(self, name: str) -> bool:
        """Whether the parameter's update runs on the host."""
        return self.on_host("master", name)

    def travels(self, kind: str, name: str) -> bool:
        """Whether a parameter's "grad" or "moments" live elsewhere than where it is updated."""
        return self.on_host(kind, name) != self.updated_on_host(name)

    @property
    def accumulates_on_host(self) -> bool:
        """Whether several reduced gradients of a step meet in host memory: copies must first meet on the device."""
        layout = self.layout
        several = layout.microbatches > 1 and layout.grad.sharded and layout.replicate == 1
        return several and bool(self._host["grad"])

    def overwritten(self, unit: str) -> list[str]:
        """The slots that hold what an update on the host changes, but for a working copy that it makes anew."""
        kinds = {"master", "moments"} | ({"work"} if self.layout.remainder else set())
        return [slot for slot in self.slots_of(unit) if slot.split(" ")[0] in kinds]

    def slots_of(self, unit: str) -> list[str]:
        """The slots that hold something of a unit."""
        return [slot for of, slot in self._used if of == unit]

    def slots(self) -> tuple[Slot, ...]:
        """Every slot, as large as the largest unit that uses it."""
        sizes: dict[str, int] = {}
        for (_, slot), used in self._used.items():
            sizes[slot] = max(sizes.get(slot, 0), used)
        return tuple(Slot(name, size) for name, size in sizes.items())

    def _place_undo(self) -> None:
        """Undo slots in the order of backward, as long as the budget lasts."""
        left = self.layout.undo_bytes
        for unit in reversed(self.units):
            trained = [param.name for param in unit.params if param.trainable]
            here = all(self._moments and self.on_host(k, name) for name in trained for k in self._host)
            size = sum(aligned(self._used[unit.name, slot]) for slot in self.overwritten(unit.name))
            if here and 0 < size <= left:
                self._used[unit.name, f"undo {unit.name}"] = size
                left -= size

    def _place(self, unit: str, turn: int, param: ParamShape) -> None:
        name, elems = param.name, param.shard_elems(self.layout.shard)
        here, grad = self.updated_on_host(name), self.layout.grad.dtype
        if here or self.on_host("grad", name):
            self._add(unit, name, "grad", f"grad {unit}", grad, elems, packed=True)
        if self.accumulates_on_host and self.on_host("grad", name):
            self._add(unit, name, "landing", f"landing {turn}", grad, elems, packed=True)
        if here:
            master = self.layout.master.dtype
            self._add(unit, name, "master" if master == torch.float32 else "remainder", f"master {unit}", master, elems)
            if self.layout.param.dtype != torch.float32:
                self._add(unit, name, "work", f"work {unit}", self.layout.param.dtype, elems)
        if self._moments and (here or self.on_host("moments", name)):
            slot = f"moments {unit}" if self.on_host("moments", name) else f"stage {turn}"
            for key, dtype, count in moment_fields(self.layout, elems):
                self._add(unit, name, key, slot, dtype, count)

    def _add(
        self, unit: str, name: str, key: str, slot: str, dtype: torch.dtype, elems: int, *, packed: bool = False
    ) -> None:
        grain = dtype.itemsize if packed else GRAIN_BYTES
        start = -(-self._used.get((unit, slot), 0) // grain) * grain
        self.at[name, key] = Place(slot, start, dtype, elems)
        self._used[unit, slot] = start + elems * dtype.itemsize


def moment_fields(layout: Layout, elems: int) -> Iterator[tuple[str, torch.dtype, int]]:
    """(key, dtype, elements) of what is stored of both moments of `elems` elements."""
    for key in ("exp_avg", "exp_avg_sq"):
        if layout.moments.dtype != torch.uint8:
            yield key, layout.moments.dtype, elems
            continue
        blocks = max(1, -(-elems // BLOCK_ELEMS))
        yield f"{key}_codes", torch.uint8, blocks * BLOCK_ELEMS
        yield f"{key}_scale", torch.float32, blocks


def schedule_of(places: Places) -> Schedule:
    """A step: gradients leave in backward, last unit first; updates run in the order in which forward needs them."""
    slots = places.slots()
    sizes = {slot.name for slot in slots}
    actions: list[Action] = []

    def add(kind: Kind, what: str, unit: str, *wanted: str) -> None:
        used = tuple(slot for slot in places.slots_of(unit) if slot.split(" ")[0] in wanted)
        if used:
            actions.append(Action(Key(kind, what, unit), used))

    for unit in reversed(places.units):
        add(Kind.EVICT, "grad", unit.name, "grad")
        add(Kind.EVICT, "landing", unit.name, "landing")
        if any(slot.startswith("landing") for slot in places.slots_of(unit.name)):
            add(Kind.COMPUTE, "accumulate", unit.name, "landing", "grad")
        if f"undo {unit.name}" in sizes:
            add(Kind.COMPUTE, "ahead", unit.name, "grad", "master", "moments", "work", "undo")
    for unit in update_order(places.units):
        names = [param.name for param in unit.params if param.trainable]
        if f"undo {unit.name}" in sizes:
            add(Kind.COMPUTE, "undo", unit.name, "master", "moments", "work", "undo")
        if any(places.travels("moments", name) for name in names):
            add(Kind.EVICT, "moments", unit.name, "stage", "moments")
            add(Kind.FETCH, "moments", unit.name, "stage", "moments")
        if any(places.travels("grad", name) and not places.updated_on_host(name) for name in names):
            add(Kind.FETCH, "grad", unit.name, "grad")
        if any(places.updated_on_host(name) for name in names):
            add(Kind.COMPUTE, "update", unit.name, "grad", "master", "moments", "work", "stage")
            own = places.layout.param.dtype == torch.float32
            add(Kind.FETCH, "work", unit.name, "master" if own else "work")
    return Schedule(slots, tuple(actions))


def update_order(units: Sequence[Unit]) -> list[Unit]:
    """As the next forward gathers them: the root, which comes last among the units, first."""
    return [*units[-1:], *units[:-1]]


def _trailing(params: Sequence[ParamShape], fraction: float) -> frozenset[str]:
    """The last parameters that hold at least `fraction` of all elements."""
    wanted, taken, names = fraction * sum(param.elems for param in params), 0, set()
    for param in reversed(params):
        if taken >= wanted:
            break
        names.add(param.name)
        taken += param.elems
    return frozenset(names)
