"""What the table costs: collectives per optimizer step and bytes per rank, exact up to FSDP2's padding.

With M microbatches, n ranks on the shard axis, r on the replicate axis, for every unit (DESIGN of the table):

    stage   all_gather                    reduce_scatter   all_reduce
    0       none (n = 1)                  none             1
    1       1                             1                1 if r > 1
    2       1                             M                1 if r > 1
    3       2 M, or M if it stays         M                1 if r > 1

At stage 3 a unit stays gathered from forward to backward if it closes forward (head and root), and all do with
`zero.reshard_after_forward=false`: of L units, c of which close forward, 2 M L - M c all-gathers.

With `zero.states_over=all` the all_reduce over r is a reduce_scatter and, of updated parameters, an all_gather.

Bytes follow `comm/ledger.py`. The counts hold for units all of whose parameters are trained; FSDP2 skips the
backward gather of a leading unit whose input and parameters need no gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from dzero.comm import dtensor_traffic
from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.mesh import PIPELINE, REPLICATE, SHARD, TENSOR
from dzero.zero.layout import Layout, TableRow
from dzero.zero.unit_shapes import UnitShape

KINDS = ("param", "grad", "master", "moments")


def expected_traffic(layout: Layout, units: Sequence[UnitShape], shared: Collection[str] = ()) -> dict[Entry, Traffic]:
    """Calls and bytes sent per rank for one optimizer step, by the ledger's entries: unshard, reduce, update.

    shared: names of tied parameters that the other end of a pipeline has as well."""
    totals: defaultdict[Entry, Traffic] = defaultdict(Traffic)

    def add(
        kind: str, axis: str, ranks: int, owned_bytes: int, wire: torch.dtype, calls: int, phase: str = "reduce"
    ) -> None:
        if ranks > 1 and owned_bytes and calls:
            totals[Entry(phase, kind, axis, dtype_key(wire))] += Traffic(calls, calls * (ranks - 1) * owned_bytes)

    microbatches, dtype, wire = layout.microbatches, layout.param.dtype, layout.wire
    for unit in units:
        own = layout.of_unit(unit)
        n, copies, hop = own.shard, own.replicate, own.replicate_wire
        back = layout.grad.dtype if layout.exact else hop
        shard, trained = unit.shard_elems(n), unit.shard_elems(n, trainable_only=True)
        gathers = microbatches if layout.param.sharded else 1
        add("all_gather", SHARD, n, shard * dtype.itemsize, dtype, gathers, "unshard")
        if layout.param.sharded and own.gathers_again:
            inner = n if own.reshard_after_forward is True else int(own.reshard_after_forward)
            add("all_gather", SHARD, inner, unit.shard_elems(inner) * dtype.itemsize, dtype, microbatches, "unshard")
        reduces = microbatches if layout.grad.sharded else 1
        add("reduce_scatter", SHARD, n, trained * wire.itemsize, wire, reduces)
        if layout.shares > 1:
            part = unit.shard_elems(n, copies, trainable_only=True)
            add("reduce_scatter", REPLICATE, copies, part * hop.itemsize, hop, 1)
            add("all_gather", REPLICATE, copies, part * dtype.itemsize, dtype, 1, "update")
            continue
        owned = -(-trained // copies)
        add("all_reduce", REPLICATE, copies, owned * (hop.itemsize + back.itemsize), hop, 1)
        for param in unit.params:
            if param.name in shared and param.trainable:
                add("exchange", PIPELINE, 2, param.shard_elems(n) * layout.grad.dtype.itemsize, layout.grad.dtype, 1)
    return dict(totals)


def copies_of(layout: Layout, unit: UnitShape) -> Traffic:
    """Of one reduction of a unit: gradients of which every rank of an axis that cuts the model has a part, and all are
    to have the sum. An all_reduce for each."""
    ranks, size = layout.model_ranks, copied_dtype(layout).itemsize
    cut = [(param, param.split) for param in unit.params if param.trainable and param.split is not None]
    summed = [param for param, split in cut if split.dim is None and split.summed]
    return Traffic(len(summed), sum(2 * (ranks - 1) * param.elems * size // ranks for param in summed))


def copied_dtype(layout: Layout) -> torch.dtype:
    """In which those are added: as the unit's backward made them, or what was added over microbatches."""
    whole = layout.microbatches > 1 and not layout.grad.sharded
    return layout.grad.dtype if whole else layout.param.dtype


def expected_copies(layout: Layout, units: Sequence[UnitShape]) -> dict[Entry, Traffic]:
    """The same in a step, of all units, by the ledger's entries (phase tensor)."""
    reductions = layout.microbatches if layout.grad.sharded else 1
    each = [copies_of(layout, unit) for unit in units]
    calls, sent = (reductions * sum(figures) for figures in zip(*((t.calls, t.sent_bytes) for t in each), strict=True))
    entry = Entry(dtensor_traffic.PHASE, "all_reduce", TENSOR, dtype_key(copied_dtype(layout)))
    return {entry: Traffic(calls, sent)} if calls else {}


def expected_control(layout: Layout, units: Sequence[UnitShape], names: int = 0) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank and step for what all ranks agree on: the decision, and the loss, of
    which every axis gathers four numbers in fp64. names: see `expected_decision`."""
    totals = expected_decision(layout, units, names)
    gathers = [entry for entry in totals if entry.kind == "all_gather"]
    ranks = {REPLICATE: layout.replicate, SHARD: layout.shard, **_model_axes(layout, units)}
    return totals | {entry: totals[entry] + Traffic(1, 8 * 4 * (ranks[entry.axis] - 1)) for entry in gathers}


SUMS_BYTES = 4 << 20
"""Of all ranks' sums of squares that one gather may bring to each rank. Below, one latency counts for more than bytes,
and nccl needs no connection between every pair of ranks; above, sums travel in slices."""


def sums_are_sliced(params: int, ranks: int) -> bool:
    """Whether the sums of squares of so many parameters, fp64, travel in slices between so many ranks."""
    return ranks * (1 + params) * 8 > SUMS_BYTES


def expected_decision(layout: Layout, units: Sequence[UnitShape], names: int = 0) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank to decide upon a step's gradients, all in fp64.

    The data-parallel ranks gather their sums, one per trained parameter, and a checksum; or, where that is much,
    exchange slices of them, a checksum with each, and gather the totals of the slices (optim/grad_norm.py). Axes that
    cut the model gather the totals of all parameters, a pipeline those of all `names` of the model.
    """
    params = sum(p.trainable for unit in units for p in unit.params)
    copies, shards = layout.replicate, layout.shard
    if sums_are_sliced(params, copies * shards):
        width = max(1, -(-params // (copies * shards)))
        sent = {
            ("all_to_all", REPLICATE): (copies - 1) * shards * (width + 1),
            ("all_to_all", SHARD): (shards - 1) * copies * (width + 1),
            ("all_gather", SHARD): (shards - 1) * width,
            ("all_gather", REPLICATE): (copies - 1) * shards * width,
        }
    else:
        sent = {
            ("all_gather", REPLICATE): (copies - 1) * (1 + params),
            ("all_gather", SHARD): (shards - 1) * copies * (1 + params),
        }
    for axis, ranks in _model_axes(layout, units).items():
        sent["all_gather", axis] = (ranks - 1) * (names if axis == PIPELINE else params)
    return {
        Entry("control", kind, axis, dtype_key(torch.float64)): Traffic(1, 8 * elems)
        for (kind, axis), elems in sent.items()
        if elems
    }


def _model_axes(layout: Layout, units: Sequence[UnitShape]) -> dict[str, int]:
    """Return the number of ranks along each axis that cuts the model, experts aside."""
    cut = (param.split for unit in units if unit.shared_by == 1 for param in unit.params)
    axes = {split.axis: split.count for split in cut if split is not None}
    return axes | ({PIPELINE: layout.pipeline_ranks} if layout.pipeline_ranks > 1 else {})


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model states on one rank, by kind of state."""

    param: int
    grad: int
    master: int
    moments: int

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.param + self.grad + self.master + self.moments


def resting_bytes(layout: Layout, units: Sequence[UnitShape]) -> StateBytes:
    """Between steps, with shards padded to the largest: FSDP2's registered shards, masters, moments, no gradients.

    8-bit moments take one code per element and one fp32 scale per started block of 256, per parameter.
    """
    shards = [(unit, layout.of_unit(unit).shard) for unit in units]
    trained = [p.shard_elems(n, layout.shares) for unit, n in shards for p in unit.params if p.trainable]
    stored = sum(unit.shard_elems(n) for unit, n in shards)
    own = layout.param.dtype == torch.float32  # an fp32 parameter is its own master
    eight = layout.moments.dtype == torch.uint8
    blocks = sum(max(1, -(-elems // 256)) for elems in trained)
    return StateBytes(
        param=stored * layout.param.dtype.itemsize,
        grad=0,
        master=0 if own else sum(trained) * layout.master.dtype.itemsize,
        moments=2 * blocks * (256 + 4) if eight else 2 * sum(trained) * layout.moments.dtype.itemsize,
    )


def peak_bytes(layout: Layout, units: Sequence[UnitShape]) -> StateBytes:
    """At the end of the last backward, just before the update, without the unsharded unit in flight.

    Stages 1-2 hold the unsharded copy beside FSDP2's shards until then; gradients that wait for the last microbatch
    are whole. This is DESIGN's second column: 2Ψ + 16Ψ/N at stage 2 with bf16 and fp32 masters.
    """
    rest, whole, trained = resting_bytes(layout, units), 0, 0
    for unit in units:
        n = layout.of_unit(unit).shard
        whole += 0 if layout.param.sharded or n == 1 else unit.shard_elems(n) * n
        waits = not layout.grad.sharded and layout.microbatches > 1 and n > 1
        shares = 1 if waits else layout.shares
        trained += unit.shard_elems(n, shares, trainable_only=True) * (n if waits else 1)
    return StateBytes(
        param=rest.param + whole * layout.param.dtype.itemsize,
        grad=trained * layout.grad.dtype.itemsize,
        master=rest.master,
        moments=rest.moments,
    )


def paper_bytes(layout: Layout, elems: int) -> StateBytes:
    """ZeRO's own formulas (Rajbhandari et al. 2020, section 5) for `elems` parameters: 2 + 2 + 4 + 8 bytes, cut by N.

    They count neither FSDP2's registered shards nor the unit in flight, and assume 16-bit gradients.
    """
    n = layout.shard

    def cut(row: TableRow, itemsize: int) -> int:
        return elems * itemsize // (n if row.sharded else 1)

    return StateBytes(
        param=cut(layout.param, 2),
        grad=cut(layout.grad, 2),
        master=cut(layout.master, 4),
        moments=cut(layout.moments, 8),
    )
