"""Cost of a layout: collectives per optimizer step, and bytes per rank, exact up to FSDP2's padding.

With M microbatches, n ranks on the shard axis, and r on the replicate axis, each unit takes per step:

    stage   all-gather                             reduce-scatter   all-reduce
    0       none (n = 1)                           none             1
    1       1                                      1                1 if r > 1
    2       1                                      M                1 if r > 1
    3       2 M, or M if it stays gathered         M                1 if r > 1

At stage 3, a unit that closes forward (head and root) stays gathered from forward to backward. With
`zero.reshard_after_forward=false` all units do. L units, c of which close forward, take 2 M L - M c all-gathers.

With replica shards, a reduce-scatter of gradients and an all-gather of updated parameters replace the
all-reduce over r.

Bytes are counted as in `comm/ledger.py`. A unit with quantized weights is gathered as stored, in uint8, and blocks
(comm/wire.py) are counted as uint8 too. The counts
hold for units whose parameters are all trained: FSDP2 skips the backward gather of a leading unit whose input and
parameters need no gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from dzero.comm import dtensor_traffic
from dzero.comm.hops import Leg, sent_bytes
from dzero.comm.ledger import Entry, Traffic, dtype_key
from dzero.comm.wire import dtype_on_wire, legs_of_sum
from dzero.mesh import PIPELINE, REPLICATE, SHARD, TENSOR
from dzero.zero.layout import Layout, TableRow
from dzero.zero.unit_shapes import UnitShape

KINDS = ("param", "grad", "master", "moments")


def expected_traffic(layout: Layout, units: Sequence[UnitShape], shared: Collection[str] = ()) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank in one optimizer step, by ledger entry (phases unshard, reduce, update).

    Args:
        layout: Layout of the model.
        units: Shapes of its units.
        shared: Names of tied parameters that the other end of the pipeline also has.
    """
    totals: defaultdict[Entry, Traffic] = defaultdict(Traffic)
    for unit in units:
        for entry, legs, calls in unit_traffic(layout, unit):
            totals[entry] += Traffic(calls, calls * sent_bytes(legs))
        for param in unit.params:
            if param.name in shared and param.trainable and layout.replica_shards == 1:
                exchanged = param.shard_elems(layout.of_unit(unit).shard) * layout.grad.dtype.itemsize
                whether = 1  # byte that says whether there is a gradient
                totals[Entry.of("reduce", "exchange", PIPELINE, layout.grad.dtype)] += Traffic(1, exchanged + whether)
    return dict(totals)


Legs = tuple[Leg, ...]


def unit_traffic(layout: Layout, unit: UnitShape) -> Iterator[tuple[Entry, Legs, int]]:
    """Yield the collectives of a unit in one optimizer step: ledger entry, legs, and number of calls."""
    own, sent, dtype = layout.of_unit(unit), collectives_of(layout, unit), layout.param.dtype
    gathered = torch.uint8 if unit.quantized or own.gather_code is not None else dtype
    again = gathered if unit.quantized or own.reshard_after_forward is True else dtype
    gathers = layout.microbatches if layout.param.sharded else 1
    reduces = layout.microbatches if layout.grad.sharded else 1
    averaged = "reduce_scatter" if layout.replica_shards > 1 else "all_reduce"
    for phase, kind, axis, wire, legs, calls in (
        ("unshard", "all_gather", SHARD, gathered, sent.gather, gathers),
        ("unshard", "all_gather", SHARD, again, sent.gather_again, layout.microbatches),
        ("reduce", "reduce_scatter", SHARD, dtype_on_wire(own.reduce_wire(unit)), sent.reduce, reduces),
        ("reduce", averaged, REPLICATE, own.replicate_wire, sent.across, 1),
        ("update", "all_gather", REPLICATE, dtype, sent.update, 1),
    ):
        if legs:
            yield Entry.of(phase, kind, axis, wire), legs, calls


@dataclass(frozen=True)
class UnitCollectives:
    """Legs of each collective of a unit; none where there is no such collective, or nothing is sent.

    Attributes:
        gather: Gather of its parameters for forward.
        gather_again: Gather of its parameters for backward.
        reduce: Reduction of its gradients over the shard axis.
        across: Reduction of this rank's gradients over the replicate axis.
        update: Gather of updated replica shards.
    """

    gather: Legs
    gather_again: Legs
    reduce: Legs
    across: Legs
    update: Legs


def collectives_of(layout: Layout, unit: UnitShape) -> UnitCollectives:
    """Return the collectives of a unit in a model with this layout."""
    own, itemsize = layout.of_unit(unit), layout.param.dtype.itemsize
    n, replicas, hop = own.shard, own.replicate, own.replicate_wire
    shards, copies = own.hops(SHARD, n), own.hops(REPLICATE, replicas)
    trained, blocks = unit.shard_elems(n, trainable_only=True), own.gather_blocks(unit)
    gather = shards.of_gather(unit.shard_bytes(n, itemsize) if blocks is None else blocks.nbytes)
    again: Legs = ()
    if layout.param.sharded and own.gathers_again:
        inner = n if own.reshard_after_forward is True else int(own.reshard_after_forward)
        again = gather if inner == n else own.hops("", inner).of_gather(unit.shard_bytes(inner, itemsize))
    reduce = legs_of_sum(own.reduce_wire(unit), trained, shards)
    if layout.replica_shards > 1:
        part = unit.shard_elems(n, replicas, trainable_only=True)
        return UnitCollectives(gather, again, reduce, legs_of_sum(hop, part, copies), copies.of_gather(part * itemsize))
    part, back = -(-trained // replicas), layout.grad.dtype if layout.exact else hop
    across = (*legs_of_sum(hop, part, copies), *copies.of_gather(part * back.itemsize))
    return UnitCollectives(gather, again, reduce, across, ())


def copies_of(layout: Layout, unit: UnitShape) -> Traffic:
    """Return the traffic of one reduction of a unit's replicated parameters over the axis that cuts the model.

    Each rank of the axis has a partial gradient of such a parameter. One all-reduce per parameter sums them.
    """
    ranks, size = layout.model_ranks, copied_dtype(layout).itemsize
    cut = [(param, param.split) for param in unit.params if param.trainable and param.split is not None]
    summed = [param for param, split in cut if split.dim is None and split.summed]
    return Traffic(len(summed), sum(2 * (ranks - 1) * param.elems * size // ranks for param in summed))


def copied_dtype(layout: Layout) -> torch.dtype:
    """Return the dtype of the all-reduces in `copies_of`: as backward made the gradients, or as accumulated."""
    whole = layout.microbatches > 1 and not layout.grad.sharded
    return layout.grad.dtype if whole else layout.param.dtype


def expected_copies(layout: Layout, units: Sequence[UnitShape]) -> dict[Entry, Traffic]:
    """Return the traffic of `copies_of` for all units in one step, by ledger entry (phase tensor)."""
    reductions = layout.microbatches if layout.grad.sharded else 1
    each = [copies_of(layout, unit) for unit in units]
    calls, sent = (reductions * sum(figures) for figures in zip(*((t.calls, t.sent_bytes) for t in each), strict=True))
    entry = Entry(dtensor_traffic.PHASE, "all_reduce", TENSOR, dtype_key(copied_dtype(layout)))
    return {entry: Traffic(calls, sent)} if calls else {}


def expected_control(layout: Layout, units: Sequence[UnitShape], names: int = 0) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank and step for values that all ranks agree on.

    These are the decision about the step, and the loss, for which every axis gathers four fp64 numbers. The
    arguments are those of `expected_decision`.
    """
    totals = expected_decision(layout, units, names)
    gathers = [entry for entry in totals if entry.kind == "all_gather"]
    ranks = {REPLICATE: layout.replicate, SHARD: layout.shard, **_model_axes(layout, units)}
    return totals | {entry: totals[entry] + Traffic(1, 8 * 4 * (ranks[entry.axis] - 1)) for entry in gathers}


SUMS_BYTES = 4 << 20
"""Largest size of all ranks' sums of squares that one gather brings to each rank.

Below, latency outweighs the bytes, and nccl needs no connection between every pair of ranks. Above, sums are exchanged
in slices."""


def sums_are_sliced(params: int, ranks: int) -> bool:
    """Return whether `ranks` ranks exchange the fp64 sums of squares of `params` parameters in slices."""
    return ranks * (1 + params) * 8 > SUMS_BYTES


def expected_decision(layout: Layout, units: Sequence[UnitShape], names: int = 0) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank to decide on a step from its gradients, all in fp64.

    Data-parallel ranks gather one sum of squares per trained parameter, and a checksum. Beyond `SUMS_BYTES`, they
    instead exchange slices of the sums, each with a checksum, and gather the totals of the slices (optim/grad_norm.py).
    Axes that cut the model gather the totals of all parameters. The pipeline axis gathers the whole model's.

    Args:
        layout: Layout of the model.
        units: Shapes of the units on this rank.
        names: Number of parameters of the whole model, in all pipeline stages.
    """
    params = sum(p.trainable for unit in units for p in unit.params)
    replicas, shards = layout.replicate, layout.shard
    if sums_are_sliced(params, replicas * shards):
        width = max(1, -(-params // (replicas * shards)))
        sent = {
            ("all_to_all", REPLICATE): (replicas - 1) * shards * (width + 1),
            ("all_to_all", SHARD): (shards - 1) * replicas * (width + 1),
            ("all_gather", SHARD): (shards - 1) * width,
            ("all_gather", REPLICATE): (replicas - 1) * shards * width,
        }
    else:
        sent = {
            ("all_gather", REPLICATE): (replicas - 1) * (1 + params),
            ("all_gather", SHARD): (shards - 1) * replicas * (1 + params),
        }
    for axis, ranks in _model_axes(layout, units).items():
        sent["all_gather", axis] = (ranks - 1) * (names if axis == PIPELINE else params)
    return {
        Entry("control", kind, axis, dtype_key(torch.float64)): Traffic(1, 8 * elems)
        for (kind, axis), elems in sent.items()
        if elems
    }


def _model_axes(layout: Layout, units: Sequence[UnitShape]) -> dict[str, int]:
    """Return the number of ranks along each axis that cuts the model, except the experts' axis."""
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
    frozen: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return self.param + self.grad + self.master + self.moments + self.frozen


def resting_bytes(layout: Layout, units: Sequence[UnitShape]) -> StateBytes:
    """Return the bytes of states between steps, with shards padded to the largest.

    They are FSDP2's registered shards, masters and moments, but no gradients. 8-bit moments take one byte per element,
    and one fp32 scale per started block of 256 elements of a parameter.
    """
    shards = [(unit, layout.of_unit(unit).shard) for unit in units]
    trained = [p.shard_elems(n, layout.replica_shards) for unit, n in shards for p in unit.params if p.trainable]
    size = layout.param.dtype.itemsize
    frozen = sum(p.shard_bytes(n, size) for unit, n in shards for p in unit.params if not p.trainable)
    own = layout.param.dtype == torch.float32  # an fp32 parameter is its own master
    eight = layout.moments.dtype == torch.uint8
    blocks = sum(max(1, -(-elems // 256)) for elems in trained)
    return StateBytes(
        param=sum(unit.shard_elems(n, trainable_only=True) for unit, n in shards) * size,
        grad=0,
        master=0 if own else sum(trained) * layout.master.dtype.itemsize,
        moments=2 * blocks * (256 + 4) if eight else 2 * sum(trained) * layout.moments.dtype.itemsize,
        frozen=frozen,
    )


def peak_bytes(layout: Layout, units: Sequence[UnitShape]) -> StateBytes:
    """Return the bytes of states at the end of the last backward, just before the update.

    The unsharded unit in flight is not counted. Until the update, stages 1 and 2 hold the unsharded parameters in
    addition to FSDP2's shards. Gradients that wait for the last microbatch are unsharded. With bf16 parameters and fp32
    masters, stage 2 takes 2Ψ + 16Ψ/N bytes for Ψ parameters on N ranks.
    """
    rest, whole, trained = resting_bytes(layout, units), 0, 0
    for unit in units:
        n = layout.of_unit(unit).shard
        whole += 0 if layout.param.sharded or n == 1 else unit.shard_elems(n) * n
        waits = not layout.grad.sharded and layout.microbatches > 1 and n > 1
        replica_shards = 1 if waits else layout.replica_shards
        trained += unit.shard_elems(n, replica_shards, trainable_only=True) * (n if waits else 1)
    return StateBytes(
        param=rest.param + whole * layout.param.dtype.itemsize,
        grad=trained * layout.grad.dtype.itemsize,
        master=rest.master,
        moments=rest.moments,
        frozen=rest.frozen,
    )


def paper_bytes(layout: Layout, elems: int) -> StateBytes:
    """Return the bytes of ZeRO's own formulas (Rajbhandari et al. 2020, section 5) for `elems` parameters.

    They are 2 + 2 + 4 + 8 bytes per parameter, each divided by the ranks if its kind is sharded. The formulas count
    neither FSDP2's registered shards nor the unit in flight, and assume 16-bit gradients.
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
