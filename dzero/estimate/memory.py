"""Bytes of one rank by tier and kind, from the ZeRO table and the costs of a microbatch, unit by unit.

    on the device while unit u runs                bytes
    param, frozen shards                           all that stay on the device; of offloaded ones, those of the unit
                                                   that is gathered next (as param)
    unsharded     gathered parameters              u, the unit around it, the root, and units that stay gathered for
                                                   backward; all at stages 1-2 if microbatches accumulate; with one
                                                   rank on the shard axis none but those fetched from the host or
                                                   decoded
    buffers       of collectives                   forward: gather buffer of u; backward: that of the next unit, and the
                                                   reduced buffer of the last; FSDP2 frees each one unit later
    grad          reduced, or whole if they wait   units whose backward has ended; all units if microbatches accumulate
    master, moments                                all that stay on the device
    residual      of rounding gradients to blocks  all, with error feedback (`precision.feedback`)
    activations                                    with temporaries and the whole gradients of u and of the root
                                                   (`microbatch_costs.py`)
    in flight     other microbatches               of a pipeline: saved activations, and receive buffers

On the host and on disk the bytes are those of the schedule's slots, exactly, since nothing else is allocated there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from dzero.comm.reduction import staged
from dzero.comm.residuals import residual_bytes
from dzero.estimate.microbatch_costs import BACKWARD, LOSS, MicrobatchCosts, UnitSpan
from dzero.mesh import REPLICATE, SHARD
from dzero.offload.buffer_layout import BufferLayout, moment_fields
from dzero.offload.build_schedule import schedule_of
from dzero.offload.memory_pool import aligned
from dzero.optim.owned_states import OwnedStates
from dzero.zero.layout import Layout
from dzero.zero.offload_config import FROZEN
from dzero.zero.tiers import names_off_device
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import nested


@dataclass(frozen=True)
class MemoryMoment:
    """Bytes that are alive on the device at the same time, by kind."""

    when: str
    kinds: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum over all kinds."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class StepMemory:
    """Memory of a step.

    Attributes:
        device: Moments of a microbatch with the most of each kind: the last has all reduced gradients, and those before
            keep what stays gathered.
        host, disk: Bytes by kind, for the whole run.
        staging: Buffers of exact reductions, on the device from the first step on and not part of the moments.
    """

    device: tuple[MemoryMoment, ...]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    staging: int = 0

    @property
    def peak(self) -> MemoryMoment:
        """Moment at which the device is fullest."""
        return max(self.device, key=lambda moment: moment.total_bytes)


def memory_of(
    layout: Layout,
    units: Sequence[UnitShape],
    costs: MicrobatchCosts,
    device_type: str,
    owned: OwnedStates | None = None,
) -> StepMemory:
    """Return the memory of a rank that trains these units; `owned` are states that owners of whole parameters keep."""
    off = off_device(layout, units, owned)
    return StepMemory(on_device(layout, units, costs, owned), *off, staging_bytes(layout, units, device_type))


def on_device(
    layout: Layout, units: Sequence[UnitShape], costs: MicrobatchCosts, owned: OwnedStates | None
) -> tuple[MemoryMoment, ...]:
    """Return the moments of one microbatch (`StepMemory.device`)."""
    return tuple(_Device(layout, units, owned).moments(costs))


def off_device(
    layout: Layout, units: Sequence[UnitShape], owned: OwnedStates | None
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes on the host and on disk by kind, which do not depend on the microbatch."""
    tiers: dict[str, dict[str, int]] = {"host": {}, "disk": {}}
    for slot in schedule_of(BufferLayout(layout, units)).slots:
        kinds = tiers[slot.tier]
        kind = next(word for word in slot.name.split(" ") if word not in ("disk", "spare"))
        kinds[kind] = kinds.get(kind, 0) + aligned(slot.count)
    away = names_off_device(layout.tiers, units)["master"]
    if owned is not None and (host := owned.most_bytes(layout, units, away)[1]):
        tiers["host"]["moments"] = host
    return tiers["host"], tiers["disk"]


def staging_bytes(layout: Layout, units: Sequence[UnitShape], device_type: str) -> int:
    """Return the bytes that `comm/reduction.py` keeps for exact reductions, on each axis those of its largest unit."""
    if not layout.exact:
        return 0
    total = 0
    for shared_by in {unit.shared_by for unit in units}:
        alike = [unit for unit in units if unit.shared_by == shared_by]
        own = layout.of_unit(alike[0])
        shards = {unit.name: unit.shard_elems(own.shard, trainable_only=True) for unit in alike}
        across = -(-max(shards.values()) // own.replicate)
        sums = [(SHARD, own.shard, own.reduce_wire(unit), shards[unit.name]) for unit in alike]
        sums.append((REPLICATE, own.replicate, own.replicate_wire, across))
        most = {SHARD: 0, REPLICATE: 0}
        for axis, ranks, wire, part in sums:
            if ranks > 1 and part:
                found = staged(wire, part, own.hops(axis, ranks), own.grad.dtype, device_type)
                most[axis] = max(most[axis], found)
        total += sum(most.values())
    return total


class _Device:
    """Bytes that are alive while each unit runs.

    Units inside another come before it, since their forward ends first. Expert units have a table of their own.
    """

    def __init__(self, layout: Layout, units: Sequence[UnitShape], owned: OwnedStates | None) -> None:
        self._layout, self._units = layout, {unit.name: unit for unit in units}
        self._own = {unit.name: layout.of_unit(unit) for unit in units}
        self._around = nested([*self._own])
        inside = {name: [each for each in self._around if self._around[each] == name] for name in self._own}
        self._order = [each for name in self._own if name not in self._around for each in (*inside[name], name)]
        away = names_off_device(layout.tiers, units)
        params = [(unit.name, self._own[unit.name], param) for unit in units for param in unit.params]
        states = [
            (own, param, param.shard_elems(own.shard, own.replica_shards))
            for _, own, param in params
            if param.trainable
        ]
        masters = sum(elems for _, param, elems in states if param.name not in away["master"])
        fields = [moment_fields(own, elems) for own, param, elems in states if param.name not in away["moments"]]
        itemsize = self._itemsize = layout.param.dtype.itemsize
        rest = {"param": 0, FROZEN: 0}
        self._away, self._packed, self._decoded = (dict.fromkeys(self._order, 0) for _ in range(3))
        for name, own, param in params:
            kind, count = "param" if param.trainable else FROZEN, param.shard_bytes(own.shard, itemsize)
            if param.codec is not None:
                self._packed[name] += count
                self._decoded[name] += param.elems * itemsize
            if param.name in away[kind]:
                self._away[name] += count
            else:
                rest[kind] += count
        buffer_layout = BufferLayout(layout, units)
        self._ahead = {
            name: count
            + sum(each.blocks.nbytes - each.blocks.elems * itemsize for each in buffer_layout.payloads[name])
            for name, count in self._away.items()
        }
        self._rest = {
            **rest,
            "master": masters * layout.master.dtype.itemsize if layout.param.dtype != torch.float32 else 0,
            "moments": (
                owned.most_bytes(layout, units, away["master"])[0]
                if owned is not None
                else sum(n * dtype.itemsize for each in fields for _, dtype, n in each)
            ),
        }
        if layout.feedback:
            self._rest["residual"] = sum(map(self._residuals, units))
        self._kept = {name for name, own in self._own.items() if own.shard > 1 and not own.param.sharded}
        ranks = {name: own.shard for name, own in self._own.items()}
        self._whole = {name: n * self._units[name].shard_elems(n) for name, n in ranks.items()}
        self._trained = {name: n * self._units[name].shard_elems(n, trainable_only=True) for name, n in ranks.items()}
        at_once = away["grad"] if buffer_layout.accumulates_on_host else frozenset[str]()
        self._accumulate = {name: self._reduced(name, at_once, 1) for name in self._order}
        self._stay = {
            name: self._reduced(name, away["grad"] | away["master"], own.replica_shards)
            for name, own in self._own.items()
        }

    def moments(self, costs: MicrobatchCosts) -> Iterator[MemoryMoment]:
        """Yield one moment per span, and the update."""
        reduced: list[str] = []
        before = ""
        last = {span.unit: at for at, span in enumerate(costs.spans) if span.direction == BACKWARD}
        stays = set[str]()
        waiting = {"in flight": costs.in_flight_bytes} if costs.in_flight_bytes else {}
        for at, span in enumerate(costs.spans):
            computed_again = span.direction == BACKWARD and span.unit in self._around  # stays for its own backward
            if span.unit in self._own and (computed_again or not self._own[span.unit].gathers_again):
                stays.add(span.unit)
            during = self._during(span, reduced, before, stays)
            yield MemoryMoment(f"{span.direction} {span.unit}", {**self._rest, **during, **waiting})
            if last.get(span.unit) == at and span.unit != self._root:
                stays.discard(span.unit)
            if last.get(span.unit) == at and span.unit not in (self._root, LOSS):
                reduced.append(span.unit)
                before = span.unit
        reduced.append(self._root)
        yield MemoryMoment("update", {**self._rest, "grad": self._grads(reduced), **waiting})

    def _residuals(self, unit: UnitShape) -> int:
        own = self._own[unit.name]
        return residual_bytes(own.hops(SHARD, own.shard), unit.shard_elems(own.shard, trainable_only=True))

    @property
    def _root(self) -> str:
        return self._order[-1]

    def _during(self, span: UnitSpan, reduced: Sequence[str], before: str, stays: Collection[str]) -> dict[str, int]:
        return {
            "param": self._rest["param"] + self._ahead.get(self._coming(span), 0),
            "unsharded": self._unsharded(span.unit, stays),
            "buffers": self._gathered(span, stays) + (self._reducing(before) if before else 0),
            "grad": self._grads(reduced),
            "activations": span.peak_bytes,
        }

    def _unsharded(self, unit: str, stays: Collection[str]) -> int:
        at_work = set() if unit == LOSS else {unit, self._around.get(unit, unit), self._root}
        between = self._kept if self._layout.microbatches > 1 else ()
        return sum(map(self._copied, {*between, *stays, *at_work}))

    def _copied(self, unit: str) -> int:
        """Return the bytes of a gathered unit; one rank uses device shards in place (`use_shards`).

        Quantized weights are decoded on any number of ranks.
        """
        if self._own[unit].shard > 1:
            return self._whole[unit] * self._itemsize
        return self._away[unit] + self._decoded[unit]

    def _coming(self, span: UnitSpan) -> str:
        """Return the unit whose shards are being prefetched (`offload/param_prefetch.py`), or "" for the next step's.

        Backward gathers one unit ahead, so the prefetched unit is the one after that. At the end of backward it is the
        root, for the next microbatch.
        """
        if span.unit == LOSS:
            again = (name for name in (self._root, *reversed(self._order)) if self._own[name].gathers_again)
            return next(again, "")
        at = self._order.index(span.unit)
        if span.direction == BACKWARD:
            return self._order[at - 2] if at >= 2 else self._root if self._layout.microbatches > 1 else ""
        return self._order[at + 1] if at + 1 < len(self._order) - 1 else ""

    def _gathered(self, span: UnitSpan, stays: Collection[str]) -> int:
        """Return the bytes of all-gather buffers: forward keeps the last one, backward has the next one in flight."""
        if span.unit == LOSS:
            return 0
        backward = span.direction == BACKWARD
        at = self._order.index(span.unit)
        if backward and not 0 < at < len(self._order) - 1:
            return 0
        unit = self._order[at - 1] if backward else span.unit
        if backward and (unit in self._kept or unit in stays):
            return 0
        ranks, packed = self._own[unit].shard, self._packed[unit]  # FSDP2 takes what is packed out of the buffer first
        blocks = self._own[unit].gather_blocks(self._units[unit])
        packed += 0 if blocks is None else blocks.nbytes
        return ranks * (self._units[unit].shard_bytes(ranks, self._itemsize) + packed) if ranks > 1 else 2 * packed

    def _reducing(self, unit: str) -> int:
        """Return the bytes of the buffer that was reduced last.

        With replica shards it includes the shard rearranged by replica shard, and the sum that a later microbatch is
        added to.
        """
        elems, own = self._trained[unit], self._own[unit]
        shards = 0 if own.replica_shards == 1 else 1 if own.microbatches == 1 else 2
        return (elems + shards * elems // own.shard) * own.grad.dtype.itemsize

    def _grads(self, reduced: Sequence[str]) -> int:
        """Return the bytes of final gradients that stay on the device, and of those that await more microbatches."""
        waiting = [name for name in self._order if name not in reduced] if self._layout.microbatches > 1 else []
        elems = sum(map(self._stay.__getitem__, reduced)) + sum(map(self._waiting, waiting))
        return elems * self._layout.grad.dtype.itemsize

    def _waiting(self, unit: str) -> int:
        """Return the elements of a unit's gradients that accumulate on the device."""
        own = self._own[unit]
        if not own.grad.sharded and own.shard > 1:
            return self._trained[unit]
        return self._accumulate[unit]

    def _reduced(self, unit: str, away: Collection[str], replica_shards: int) -> int:
        """Return the elements of a unit's reduced buffer, which is alive as long as any slice of it is."""
        shape = self._units[unit]
        stays = any(param.trainable and param.name not in away for param in shape.params)
        return shape.shard_elems(self._own[unit].shard, replica_shards, trainable_only=True) if stays else 0
