"""Bytes of one rank, by tier and kind, from the table and what a microbatch costs: what is alive at once, unit by unit.

    on the device while unit u is at work          bytes
    param         shards                           those of the table that stay on the device; of the others the unit's
                                                   that is gathered next
    unsharded     gathered parameters              all units at stages 1-2; else u's and the root's
    buffers       of collectives                   forward: u's gathered buffer; backward: the next unit's, and the
                                                   reduced buffer of the unit before; FSDP2 frees each one later
    grad          reduced, or whole while waiting  units whose backward has ended; others where microbatches accumulate
    master, moments                                those that stay on the device
    activations   and temporaries, whole gradients of u and of the root: costs.py

Host and disk hold what the schedule's slots are large: exact, since nothing else is allocated there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from dzero.comm.exchange import BLOCK_BYTES
from dzero.offload.actions import schedule_of
from dzero.offload.pinned import aligned
from dzero.offload.places import Places, moment_fields
from dzero.plan.costs import BACKWARD, LOSS, Costs, Span
from dzero.zero.layout import Layout
from dzero.zero.shapes import ParamShape, UnitShape
from dzero.zero.tiers import names_off_device


@dataclass(frozen=True)
class Moment:
    """What is alive on the device at once, by kind."""

    when: str
    kinds: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """All kinds together."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Memory:
    """`device`: the moments of a step's last microbatch. `host`, `disk`: by kind, for the whole run.

    `staging`: of exact reductions, on the device from the first step on, besides the moments.
    """

    device: tuple[Moment, ...]
    host: Mapping[str, int]
    disk: Mapping[str, int]
    staging: int = 0

    @property
    def peak(self) -> Moment:
        """When the device holds most."""
        return max(self.device, key=lambda moment: moment.total_bytes)


def with_moments(memory: Memory, count: int) -> Memory:
    """The same with so many tensors per parameter as a rule keeps, where the table has AdamW's two."""

    def kept(kinds: Mapping[str, int]) -> dict[str, int]:
        return {kind: each * count // 2 if kind == "moments" else each for kind, each in kinds.items()}

    if count == 2:
        return memory
    device = tuple(Moment(moment.when, kept(moment.kinds)) for moment in memory.device)
    return replace(memory, device=device, host=kept(memory.host), disk=kept(memory.disk))


def memory_of(layout: Layout, units: Sequence[UnitShape], costs: Costs, device_type: str) -> Memory:
    """Of a rank that trains these units; `costs` of one of its microbatches."""
    return Memory(
        on_device(layout, units, costs), *off_device(layout, units), staging_bytes(layout, units, device_type)
    )


def on_device(layout: Layout, units: Sequence[UnitShape], costs: Costs) -> tuple[Moment, ...]:
    """The moments of a step's last microbatch."""
    return tuple(_Device(layout, units).moments(costs))


def off_device(layout: Layout, units: Sequence[UnitShape]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes on the host and on disk, by kind; they depend on no microbatch."""
    tiers: dict[str, dict[str, int]] = {"host": {}, "disk": {}}
    for slot in schedule_of(Places(layout, units)).slots:
        kinds = tiers[slot.tier]
        kind = next(word for word in slot.name.split(" ") if word not in ("disk", "spare"))
        kinds[kind] = kinds.get(kind, 0) + aligned(slot.count)
    return tiers["host"], tiers["disk"]


def staging_bytes(layout: Layout, units: Sequence[UnitShape], device_type: str) -> int:
    """What comm/exchange.py keeps for exact reductions: blocks of all ranks' payloads, two in turn; axis by axis."""
    if not layout.exact:
        return 0
    shard = max(unit.shard_elems(layout.shard, trainable_only=True) for unit in units)
    total = 0
    for ranks, wire, part in (
        (layout.shard, layout.wire, shard),
        (layout.replicate, layout.replicate_wire, -(-shard // layout.replicate)),
    ):
        slot_bytes = 2 * ranks * (1 if layout.grad.dtype == wire else 2) * wire.itemsize
        total += min(part, max(1, BLOCK_BYTES[device_type] // slot_bytes)) * slot_bytes if ranks > 1 else 0
    return total


class _Device:
    """What is alive while each unit is at work."""

    def __init__(self, layout: Layout, units: Sequence[UnitShape]) -> None:
        self._layout, self._ranks = layout, layout.shard
        self._order = [unit.name for unit in units]
        away = names_off_device(layout.tiers, units)
        every = [param for unit in units for param in unit.params]
        trained = [param for param in every if param.trainable]
        param, master = layout.param.dtype, layout.master.dtype
        mastered = [] if param == torch.float32 else [p for p in trained if p.name not in away["master"]]
        self._rest = {
            "param": self._shards([p for p in every if p.name not in away["param"]]) * param.itemsize,
            "master": self._shards(mastered, layout.shares) * master.itemsize,
            "moments": sum(self._moment_bytes(param) for param in trained if param.name not in away["moments"]),
        }
        self._away = {
            unit.name: self._shards([p for p in unit.params if p.name in away["param"]]) * param.itemsize
            for unit in units
        }
        self._kept = layout.shard > 1 and not layout.param.sharded
        self._wholes = {(unit.name, only): self._gathered_elems(unit, only) for unit in units for only in (False, True)}
        at_once = away["grad"] if Places(layout, units).accumulates_on_host else frozenset[str]()
        self._accumulate, self._stay = (
            {unit.name: self._reduced(unit, off, shares) for unit in units}
            for off, shares in ((at_once, 1), (away["grad"] | away["master"], layout.shares))
        )

    def moments(self, costs: Costs) -> Iterator[Moment]:
        """One per span, and the update."""
        reduced: list[str] = []
        before = ""
        for span in costs.spans:
            yield Moment(f"{span.direction} {span.unit}", self._rest | self._during(span, reduced, before))
            if span.direction == BACKWARD and span.unit not in (self._root, LOSS) and span.unit not in reduced:
                reduced.append(span.unit)
                before = span.unit
        reduced.append(self._root)
        yield Moment("update", self._rest | {"grad": self._grads(reduced)})

    @property
    def _root(self) -> str:
        return self._order[-1]

    def _during(self, span: Span, reduced: Sequence[str], before: str) -> dict[str, int]:
        backward = span.direction == BACKWARD
        return {
            "param": self._rest["param"] + self._away.get(self._coming(span), 0),
            "unsharded": self._unsharded(span.unit),
            "buffers": self._gathered(span, backward) + (self._reducing(before) if before else 0),
            "grad": self._grads(reduced),
            "activations": span.peak_bytes,
        }

    def _unsharded(self, unit: str) -> int:
        names = self._order if self._kept else set() if unit == LOSS else {unit, self._root}
        return sum(self._whole(name) for name in names) * self._layout.param.dtype.itemsize

    def _coming(self, span: Span) -> str:
        """The unit whose shards are brought ahead of its gather (offload/incoming.py); "" for none: of the next step.

        Backward gathers a unit ahead, so it is the one behind that; the root's are, of the next microbatch.
        """
        if span.unit == LOSS:
            return self._root
        at = self._order.index(span.unit)
        if span.direction == BACKWARD:
            return self._order[at - 2] if at >= 2 else self._root if self._layout.microbatches > 1 else ""
        return self._order[at + 1] if at + 1 < len(self._order) - 1 else ""

    def _gathered(self, span: Span, backward: bool) -> int:
        """Buffers of all-gathers: forward keeps the last one, backward has the next one under way."""
        if self._ranks == 1 or span.unit == LOSS:
            return 0
        itemsize = self._layout.param.dtype.itemsize
        if self._kept:
            return 0 if backward else self._whole(span.unit) * itemsize
        if not backward:
            return self._whole(span.unit) * itemsize
        at = self._order.index(span.unit)
        return self._whole(self._order[at - 1]) * itemsize if 0 < at < len(self._order) - 1 else 0

    def _reducing(self, unit: str) -> int:
        """The buffer that was reduced last; and where copies share states out, the shard laid out part by part, beside
        what came of a microbatch and is added to others."""
        elems = self._whole(unit, trainable_only=True)
        shards = 0 if self._layout.shares == 1 else 1 if self._layout.microbatches == 1 else 2
        return (elems + shards * elems // self._ranks) * self._layout.grad.dtype.itemsize

    def _grads(self, reduced: Sequence[str]) -> int:
        """Of units that are reduced for good what stays on the device, and of others what waits for that."""
        waiting = [name for name in self._order if name not in reduced] if self._layout.microbatches > 1 else []
        elems = sum(map(self._stay.__getitem__, reduced)) + sum(map(self._waiting, waiting))
        return elems * self._layout.grad.dtype.itemsize

    def _waiting(self, unit: str) -> int:
        """Elements of a unit's gradients that accumulate on the device."""
        if not self._layout.grad.sharded and self._ranks > 1:
            return self._whole(unit, trainable_only=True)
        return self._accumulate[unit]

    def _reduced(self, unit: UnitShape, away: Collection[str], shares: int) -> int:
        """Elements of a unit's reduced buffer, which is there as long as a slice of it is."""
        stays = any(param.trainable and param.name not in away for param in unit.params)
        return unit.shard_elems(self._ranks, shares, trainable_only=True) if stays else 0

    def _whole(self, unit: str, *, trainable_only: bool = False) -> int:
        return self._wholes[unit, trainable_only]

    def _gathered_elems(self, unit: UnitShape, trainable_only: bool) -> int:
        return unit.shard_elems(self._ranks, trainable_only=trainable_only) * self._ranks

    def _shards(self, params: Sequence[ParamShape], shares: int = 1) -> int:
        return sum(param.shard_elems(self._ranks, shares) for param in params)

    def _moment_bytes(self, param: ParamShape) -> int:
        elems = param.shard_elems(self._ranks, self._layout.shares)
        return sum(n * dtype.itemsize for _, dtype, n in moment_fields(self._layout, elems))
