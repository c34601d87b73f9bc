"""From the table to places: which states of which parameters lie in host memory, in which slot, at which offset.

    slot              holds                                                there
    param <unit>      working copies, frozen ones too                      if their tier is host; but see below
    grad <unit>       gradients, laid out as FSDP2's reduced buffer        if that tier is host, or updated here
    master <unit>     fp32 masters or 16-bit remainders                    if their tier is host
    moments <unit>    both moments                                         if their tier is host
    work <unit>       new working copies on their way to the device        if updated here, but for fp32
                      (or to the param slot)
    landing 0, 1      a later microbatch's gradients until they are added  if gradients accumulate here
    stage 0, 1        device moments while they are updated here           if only the master's tier is host
    undo <unit>       what an early update overwrites                      with overlap=backward, within its budget

A parameter is updated where its master lives; its moments and its gradient travel there if they live elsewhere. One
that lives here is updated in place, and in fp32 is its own master, unless its new values must wait (`waiting`).
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
from dzero.zero.tiers import names_on_host

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
    """Of every parameter's states: which are on the host, and where. Pure: no memory is taken.

    moments: whether they need a place; else whoever updates keeps them.
    """

    def __init__(self, layout: Layout, units: Sequence[UnitShape], *, moments: bool = True) -> None:
        self.layout, self.units, self._moments = layout, units, moments
        self._host = names_on_host(layout.tiers, units)
        self.at: dict[tuple[str, str], Place] = {}
        self._used: dict[tuple[str, str], int] = {}
        for turn, unit in enumerate(units):
            for param in unit.params:
                self._place(unit.name, turn % TURNS, param)
        self._place_undo()

    def on_host(self, kind: str, name: str) -> bool:
        """Whether a parameter's "param", "grad", "master" or "moments" lie in host memory between their uses."""
        return name in self._host[kind]

    def updated_on_host(self, name: str) -> bool:
        """Whether the parameter's update runs on the host."""
        return self.on_host("master", name)

    def travels(self, kind: str, name: str) -> bool:
        """Whether a parameter's "grad" or "moments" live elsewhere than where it is updated."""
        return self.on_host(kind, name) != self.updated_on_host(name)

    @property
    def waiting(self) -> bool:
        """Whether an update may run while backward still needs the weights it replaces."""
        return self.layout.offload.mode in ("backward", "delayed")

    def published(self, name: str) -> bool:
        """Whether a parameter's new values are copied to its place on the host, once nobody needs the old ones."""
        return self.waiting and self.on_host("param", name) and self.updated_on_host(name)

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
        left = self.layout.offload.undo_bytes if self.layout.offload.mode == "backward" else 0
        for unit in reversed(self.units):
            trained = [param.name for param in unit.params if param.trainable]
            kinds = ("grad", "master", "moments")
            here = all(self._moments and self.on_host(kind, name) for name in trained for kind in kinds)
            size = sum(aligned(self._used[unit.name, slot]) for slot in self.overwritten(unit.name))
            if here and 0 < size <= left:
                self._used[unit.name, f"undo {unit.name}"] = size
                left -= size

    def _place(self, unit: str, turn: int, param: ParamShape) -> None:
        name, elems = param.name, param.shard_elems(self.layout.shard)
        if not param.trainable:
            if self.on_host("param", name):
                self._add(unit, name, "param", f"param {unit}", self.layout.param.dtype, elems)
            return
        here, grad = self.updated_on_host(name), self.layout.grad.dtype
        if here or self.on_host("grad", name):
            self._add(unit, name, "grad", f"grad {unit}", grad, elems, packed=True)
        if self.accumulates_on_host and self.on_host("grad", name):
            self._add(unit, name, "landing", f"landing {turn}", grad, elems, packed=True)
        if here:
            self._place_values(unit, name, elems)
        if self._moments and (here or self.on_host("moments", name)):
            slot = f"moments {unit}" if self.on_host("moments", name) else f"stage {turn}"
            for key, dtype, count in moment_fields(self.layout, elems):
                self._add(unit, name, key, slot, dtype, count)

    def _place_values(self, unit: str, name: str, elems: int) -> None:
        """Master and working copy of a parameter that is updated here."""
        param, master, at = self.layout.param.dtype, self.layout.master.dtype, self.at
        self._add(unit, name, "master" if master == torch.float32 else "remainder", f"master {unit}", master, elems)
        stays = self.on_host("param", name)
        if stays and (param != torch.float32 or self.waiting):
            self._add(unit, name, "param", f"param {unit}", param, elems)
        elif stays:
            at[name, "param"] = at[name, "master"]
        if param != torch.float32 and stays and not self.waiting:
            at[name, "work"] = at[name, "param"]
        elif param != torch.float32:
            self._add(unit, name, "work", f"work {unit}", param, elems)

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
    """A step: parameters come for forward (and again, in the other order, for backward), gradients leave in backward,
    last unit first, and updates run in the order in which forward needs them."""
    slots = places.slots()
    sizes = {slot.name for slot in slots}
    actions: list[Action] = []

    def add(kind: Kind, what: str, unit: str, *wanted: str) -> None:
        used = tuple(slot for slot in places.slots_of(unit) if slot.split(" ")[0] in wanted)
        if used:
            actions.append(Action(Key(kind, what, unit), used))

    own = places.layout.param.dtype == torch.float32
    for unit in update_order(places.units):
        if any(places.on_host("param", param.name) for param in unit.params):
            add(Kind.FETCH, "param", unit.name, "param", *(["master"] if own and not places.waiting else []))
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
            in_place = [] if places.waiting else ["param"]
            add(Kind.COMPUTE, "update", unit.name, "grad", "master", "moments", "work", "stage", *in_place)
        if any(places.published(name) for name in names):
            add(Kind.COMPUTE, "publish", unit.name, "master" if own else "work", "param")
        if any(places.updated_on_host(name) and not places.on_host("param", name) for name in names):
            add(Kind.FETCH, "work", unit.name, "master" if own else "work")
    return Schedule(slots, tuple(actions))


def update_order(units: Sequence[Unit]) -> list[Unit]:
    """As the next forward gathers them: the root, which comes last among the units, first."""
    return [*units[-1:], *units[:-1]]
