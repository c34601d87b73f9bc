"""Buffer layout: the slot and the offset of each offloaded state of each parameter, from the table (`zero/layout.py`).

    host slot         contents                                             exists if
    param <unit>      working copies                                       param's tier is host; exceptions below
    frozen <unit>     frozen parameters, as they are stored                frozen's tier is host
    grad <unit>       gradients, laid out as FSDP2's reduced buffer        grad's tier is host, or the host updates
    master <unit>     fp32 masters or 16-bit remainders                    master's tier is host
    moments <unit>    both moments                                         moments' tier is host
    payload <unit>    parameters as blocks, for the device to decode       precision.fetch is not that of param
    work <unit>       new working copies on their way to the device        the host updates, except in fp32
                      or to the param slot
    landing 0, 1      gradients of a later microbatch, to be added         gradients accumulate on the host
    stage 0, 1        device moments while they are updated on the host    only master's tier is host
    undo <unit>       the other place of states that an update overwrites  overlap=backward, within its budget
    <kind> turn k     the same, in a slot that units share in turn         the kind's tier is disk; for work, master's
    passing turn k    device gradients on their way to an update           only master's tier is disk

    disk slot             contents                                         exists if
    disk <kind> <unit>    contents of the unit's turn slot; for param,     the kind's tier is disk
                          the target of its new working copies
    spare <kind> <unit>   new states of a speculative update               master and moments are on disk, as undo

A parameter is updated where its master is stored, or on the host if the master is on disk. Its moments and gradient are
moved there if they are stored elsewhere. A parameter on the host is updated in place, and in fp32 it is its own master,
unless its new values must wait (`waiting`).

A turn slot is as large as the largest unit that uses it, and units use turn slots round-robin: of states with the
default, one unit is loaded, one is updated, and one is written back. An output head uses the
turn of the embedding, which is as large. With two turn slots of that size, all other units would use only a part.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from dzero.comm.wire import Blocks
from dzero.offload.memory_pool import aligned
from dzero.offload.schedule import BufferSlot
from dzero.zero.layout import Layout
from dzero.zero.offload_config import FROZEN
from dzero.zero.tiers import names_off_device
from dzero.zero.unit_shapes import ParamShape, UnitShape

GRAIN_BYTES = 64
BLOCK_ELEMS = 256
TURNS = 2
UPDATED = ("master", "moments")


@dataclass(frozen=True)
class BufferSlice:
    """Range of a host slot: `elems` elements of `dtype`, from byte `start_bytes` on."""

    slot: str
    start_bytes: int
    dtype: torch.dtype
    elems: int


@dataclass(frozen=True)
class SlotPair:
    """Turn slot on the host, and the disk slot that stores the same bytes of one unit."""

    host: str
    disk: str


@dataclass(frozen=True)
class Payload:
    """Parameters of a unit that are fetched in blocks, all of one host slot.

    Attributes:
        names: Names of the parameters.
        source: The slot up to their end, in their dtype.
        place: Location of the payload.
        blocks: Format, for parameters that lie one after the other.
        within: Format, for parameters in their places in `source`.
    """

    names: tuple[str, ...]
    source: BufferSlice
    place: BufferSlice
    blocks: Blocks
    within: Blocks


class BufferLayout:
    """Location of every offloaded state of every parameter; allocates no memory.

    Args:
        layout: The table.
        units: Shapes of the units, in forward order with the root last.

    Attributes:
        at: Location by (parameter name, key). The key is a kind of state, "remainder", "work", "landing", or a key of
            `moment_fields`; "undo <key>" is the state's other place (`offload/undo.py`). The location of a payload is
            that of (host slot that it is made of, "payload").
        payloads: What each unit is fetched as, except for parameters that are fetched as they are stored.
        early: Names of units that may be updated before the step is decided.
        undo_places: Where in its undo slot each of them has the contents of slots that an update overwrites, as bytes,
            by unit and slot.
    """

    def __init__(self, layout: Layout, units: Sequence[UnitShape]) -> None:
        self.layout, self.units = layout, units
        self._off_device = names_off_device(layout.tiers, units)
        self.at: dict[tuple[str, str], BufferSlice] = {}
        self._used: dict[tuple[str, str], int] = {}
        self._pieces: dict[tuple[str, str], str] = {}
        self._makes_param: dict[str, str] = {}
        for unit, index in zip(units, _numbers(units), strict=True):
            shard = layout.of_unit(unit).shard
            for param in unit.params:
                self._place(unit.name, index, param, shard)
        self.payloads = {unit.name: tuple(self._place_payloads(unit)) for unit in units}
        self.early = self._early_units()
        self.undo_places = {unit.name: self._place_undo(unit) for unit in units if unit.name in self.early}

    def on_host(self, kind: str, name: str) -> bool:
        """Return whether a parameter's "param", "frozen", "grad", "master" or "moments" is on the host or on disk."""
        return name in self._off_device[kind]

    def on_disk(self, kind: str, name: str) -> bool:
        """Return whether a parameter's "param", "frozen", "grad", "master" or "moments" is stored on disk."""
        return self.on_host(kind, name) and self.layout.tiers[kind][0] == "disk"

    def updated_on_host(self, name: str) -> bool:
        """Return whether the parameter's update runs on the host."""
        return self.on_host("master", name)

    def travels(self, kind: str, name: str) -> bool:
        """Return whether a parameter's "grad" or "moments" must move for its update, being stored elsewhere."""
        return self.on_host(kind, name) != self.updated_on_host(name)

    @property
    def turns(self) -> int:
        """Number of slots that units on disk take turns in: for the one in use, and those loaded ahead of their use."""
        return 1 + self.layout.offload.prefetch_units

    @property
    def waiting(self) -> bool:
        """Whether an update may run while backward still needs the weights it replaces."""
        return self.layout.offload.mode in ("backward", "delayed")

    @property
    def own(self) -> bool:
        """Whether parameters are their own masters (fp32)."""
        return self.layout.param.dtype == torch.float32

    def published(self, name: str) -> bool:
        """Return whether new values of a parameter are copied to its host slot once nothing needs the old ones."""
        here = self.on_host("param", name) and not self.on_disk("param", name) and self.updated_on_host(name)
        return here and (self.waiting or (self.own and self.on_disk("master", name)))

    @property
    def accumulates_on_host(self) -> bool:
        """Whether several reduced gradients of a step are added in host memory.

        With replicas they are not, because replicas must be all-reduced on the device first.
        """
        layout = self.layout
        several = layout.microbatches > 1 and layout.grad.sharded and layout.replicate == 1
        return several and bool(self._off_device["grad"])

    def overwritten(self, unit: str) -> list[str]:
        """Return the host slots of one unit alone that an update overwrites, except working copies made anew."""
        kinds = {*UPDATED} | ({"work"} if self.layout.remainder else set())
        return [slot for slot in self.slots_of(unit) if slot.split(" ")[0] in kinds and not _takes_turns(slot)]

    def slots_of(self, unit: str) -> list[str]:
        """Return the host slots that hold states of a unit."""
        return [slot for of, slot in self._used if of == unit]

    def pairs(self, what: str, unit: str) -> list[SlotPair]:
        """Return the slots that are loaded from disk, or written back, together.

        what     contents
        states   master and moments, and with a remainder its working copy, which is not written back
        grad     gradients
        param    working copies for the device
        work     new working copies, which are only written
        """
        if what == "work":
            piece = f"disk param {unit}"
            return [SlotPair(self._makes_param[unit], piece)] if unit in self._makes_param else []
        kinds = {"states": (*UPDATED, "work"), "grad": ("grad",), "param": ("param", FROZEN)}[what]
        found = [(slot, self._pieces.get((unit, slot))) for slot in self.slots_of(unit) if slot.split(" ")[0] in kinds]
        return [SlotPair(slot, piece) for slot, piece in found if piece is not None]

    def going(self, what: str, unit: str) -> list[SlotPair]:
        """Return those of `pairs` that are written back: all but the working copy of a remainder in "states"."""
        return [pair for pair in self.pairs(what, unit) if what != "states" or pair.disk.split(" ")[1] in UPDATED]

    def makes_all(self, unit: str, names: Collection[str]) -> bool:
        """Return whether an update of `names` makes all working copies that a unit has on disk, except frozen ones."""
        if unit not in self._makes_param:
            return True
        (shape,) = (each for each in self.units if each.name == unit)
        return all(p.name in names for p in shape.params if p.trainable and self.on_disk("param", p.name))

    def piece_bytes(self) -> dict[str, int]:
        """Return the size in bytes of every disk slot, including spare ones."""
        sizes = {piece: self._used[of] for of, piece in self._pieces.items()}
        early = [unit.name for unit in self.units if unit.name in self.early]
        spares = [pair.disk for unit in early for pair in self.going("states", unit)]
        return sizes | {spare_of(piece): sizes[piece] for piece in spares}

    def slots(self) -> tuple[BufferSlot, ...]:
        """Return every slot; a host slot is as large as the largest unit that uses it."""
        sizes: dict[str, int] = {}
        for (_, slot), used in self._used.items():
            sizes[slot] = max(sizes.get(slot, 0), used)
        on_disk = (BufferSlot(name, size, "disk") for name, size in self.piece_bytes().items())
        return (*(BufferSlot(name, size) for name, size in sizes.items()), *on_disk)

    def _place_payloads(self, unit: UnitShape) -> Iterator[Payload]:
        """Place the payloads of a unit, one for each slot with matrices that are not quantized already."""
        if (code := self.layout.fetch_code) is None:
            return
        by_slot: dict[str, list[ParamShape]] = {}
        for param in unit.params:
            if param.codec is None and self.on_host("param" if param.trainable else FROZEN, param.name):
                by_slot.setdefault(self.at[param.name, "param"].slot, []).append(param)
        for slot, params in by_slot.items():
            places = [self.at[param.name, "param"] for param in params]
            dtype = places[0].dtype
            starts = tuple(place.start_bytes // dtype.itemsize for place in places)
            end = max(start + place.elems for start, place in zip(starts, places, strict=True))
            sizes = tuple((place.elems, len(param.shape) < 2) for param, place in zip(params, places, strict=True))
            if all(is_whole for _, is_whole in sizes):
                continue
            blocks = Blocks(sizes, code)
            self._add(unit.name, slot, "payload", f"payload {unit.name}", torch.uint8, blocks.nbytes)
            yield Payload(
                names=tuple(param.name for param in params),
                source=BufferSlice(slot, 0, dtype, end),
                place=self.at[slot, "payload"],
                blocks=blocks,
                within=replace(blocks, starts=starts),
            )

    def _early_units(self) -> frozenset[str]:
        """Return the units, in backward order, whose undo and spare slots are within the budget."""
        left = self.layout.offload.undo_bytes if self.layout.offload.mode == "backward" else 0
        early = set()
        for unit in reversed(self.units):
            trained = [param.name for param in unit.params if param.trainable]
            here = all(self.on_host(kind, name) for name in trained for kind in ("grad", *UPDATED))
            on_host = sum(aligned(self._used[unit.name, slot]) for slot in self.overwritten(unit.name))
            going = self.going("states", unit.name)
            size = on_host + sum(aligned(self._used[unit.name, pair.host]) for pair in going)
            if here and 0 < size <= left:
                early.add(unit.name)
                left -= size
        return frozenset(early)

    def _place_undo(self, unit: UnitShape) -> dict[str, BufferSlice]:
        """Lay out the undo slot of a unit: its overwritten slots one after the other, each as it is."""
        start, undo, places = 0, f"undo {unit.name}", dict[str, BufferSlice]()
        fields = [key for key, _, _ in moment_fields(self.layout, 0)]
        for slot in self.overwritten(unit.name):
            for param, key in product(unit.params, ("master", "remainder", "work", *fields)):
                if (place := self.at.get((param.name, key))) is not None and place.slot == slot:
                    other = replace(place, slot=undo, start_bytes=start + place.start_bytes)
                    self.at[param.name, f"undo {key}"] = other
            places[slot] = BufferSlice(undo, start, torch.uint8, self._used[unit.name, slot])
            start += aligned(self._used[unit.name, slot])
        if places:
            self._used[unit.name, undo] = start
        return places

    def _place(self, unit: str, index: int, param: ParamShape, shard: int) -> None:
        name, own_slot = param.name, self._slot
        elems = param.shard_elems(shard, self.layout.replica_shards)
        param_turn = f"turn {index % self.turns}"
        if not param.trainable:
            slot = f"frozen {param_turn if self.on_disk(FROZEN, name) else unit}"
            if self.on_host(FROZEN, name):
                stored = param.shard_bytes(shard, self.layout.param.dtype.itemsize)
                dtype = self.layout.param.dtype if param.codec is None else torch.uint8
                self._add(unit, name, "param", slot, dtype, stored // dtype.itemsize)
            if self.on_disk(FROZEN, name):
                self._pieces[unit, slot] = f"disk frozen {unit}"
            return
        here, grad = self.updated_on_host(name), self.layout.grad.dtype
        if here or self.on_host("grad", name):
            passing = self.on_disk("master", name) and not self.on_host("grad", name)
            slot = f"passing turn {index % self.turns}" if passing else own_slot("grad", unit, index, name)
            self._add(unit, name, "grad", slot, grad, elems, packed=True)
        if self.accumulates_on_host and self.on_host("grad", name):
            self._add(unit, name, "landing", f"landing {index % TURNS}", grad, elems, packed=True)
        if here:
            self._place_values(unit, name, elems, index, param_turn)
        fields, moments_here = [*moment_fields(self.layout, elems)], self.on_host("moments", name)
        if fields and (here or moments_here):
            slot = own_slot("moments", unit, index, name) if moments_here else f"stage {index % TURNS}"
            for key, dtype, count in fields:
                self._add(unit, name, key, slot, dtype, count)

    def _slot(self, kind: str, unit: str, index: int, name: str) -> str:
        """Return the host slot of a kind that is off the device, and record its disk slot if it has one."""
        if not self.on_disk(kind, name):
            return f"{kind} {unit}"
        slot = f"{kind} turn {index % self.turns}"
        self._pieces[unit, slot] = f"disk {kind} {unit}"
        return slot

    def _place_values(self, unit: str, name: str, elems: int, index: int, param_turn: str) -> None:
        """Place the master and the working copy of a parameter that is updated on the host."""
        param, master, at = self.layout.param.dtype, self.layout.master.dtype, self.at
        key = "master" if master == torch.float32 else "remainder"
        self._add(unit, name, key, self._slot("master", unit, index, name), master, elems)
        in_host_memory = self.on_host("param", name) and not self.on_disk("param", name)
        if in_host_memory and self.own and not self.published(name):
            at[name, "param"] = at[name, "master"]
        elif in_host_memory:
            self._add(unit, name, "param", f"param {unit}", param, elems)
        if not self.own and in_host_memory and not self.waiting:
            at[name, "work"] = at[name, "param"]
        elif not self.own:
            self._add(unit, name, "work", self._work_slot(unit, index, name), param, elems)
        if self.on_disk("param", name):
            self._pair_with_work(unit, name, f"param {param_turn}")

    def _work_slot(self, unit: str, index: int, name: str) -> str:
        """Return the slot of new working copies: a turn slot if they leave at once and are not updated in place."""
        on_disk = self.on_disk("param", name)
        goes = self.on_disk("master", name) and not self.waiting and (not self.layout.remainder or on_disk)
        slot = f"work turn {index % self.turns}" if goes else f"work {unit}"
        if goes and self.layout.remainder:
            self._pieces[unit, slot] = f"disk param {unit}"
        return slot

    def _pair_with_work(self, unit: str, name: str, slot: str) -> None:
        """Lay out `slot`, which is read from disk, like the slot that new values are made in: the master's or work."""
        made = self.at[name, "master" if self.own else "work"]
        self.at[name, "param"] = replace(made, slot=slot)
        self._used[unit, slot] = self._used[unit, made.slot]
        if self.own and self.on_disk("master", name):
            self._pieces[unit, slot] = f"disk master {unit}"
        else:
            self._pieces[unit, slot] = f"disk param {unit}"
            self._makes_param[unit] = made.slot

    def _add(
        self, unit: str, name: str, key: str, slot: str, dtype: torch.dtype, elems: int, *, packed: bool = False
    ) -> None:
        grain = dtype.itemsize if packed else GRAIN_BYTES
        start = -(-self._used.get((unit, slot), 0) // grain) * grain
        self.at[name, key] = BufferSlice(slot, start, dtype, elems)
        self._used[unit, slot] = start + elems * dtype.itemsize


def _numbers(units: Sequence[UnitShape]) -> Iterator[int]:
    """Yield the turn number of each unit: its index, but for an output head that of a unit at least as large."""
    sizes = [sum(param.elems for param in unit.params) for unit in units]
    for index, unit in enumerate(units):
        is_head = unit.closes_forward and index < len(units) - 1
        first = next((other for other in range(index) if sizes[other] >= sizes[index]), index)
        yield first if is_head else index


def spare_of(piece: str) -> str:
    """Return the disk slot that alternates with `piece` in speculative updates."""
    return piece.replace("disk", "spare", 1)


def _takes_turns(slot: str) -> bool:
    return slot.split(" ")[1] == "turn" and slot.count(" ") == 2


def state_of(key: str) -> str:
    """Return the key of a state of a class of `torch.optim` in `BufferLayout.at`, where it is no other state's."""
    return f"state {key}"


def moment_fields(layout: Layout, elems: int) -> Iterator[tuple[str, torch.dtype, int]]:
    """Yield (key, dtype, number of elements) of each tensor that stores the moments of `elems` elements.

    The keys of a class of `torch.optim` are those of `state_of`.
    """
    for key, dtype in layout.rule_states or ():
        yield state_of(key), dtype, elems
    for key in ("exp_avg", "exp_avg_sq") if layout.rule_states is None else ():
        if layout.moments.dtype != torch.uint8:
            yield key, layout.moments.dtype, elems
            continue
        blocks = max(1, -(-elems // BLOCK_ELEMS))
        yield f"{key}_codes", torch.uint8, blocks * BLOCK_ELEMS
        yield f"{key}_scale", torch.float32, blocks
