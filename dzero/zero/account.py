"""What the table costs: collectives per optimizer step and bytes per rank, exact up to FSDP2's padding.

With M microbatches, n ranks on the shard axis, r on the replicate axis, for every unit (DESIGN of the table):

    stage   all_gather                    reduce_scatter   all_reduce
    0       none (n = 1)                  none             1
    1       1                             1                1 if r > 1
    2       1                             M                1 if r > 1
    3       2 M (M if kept after forward) M                1 if r > 1

Bytes follow `ledger.sent_bytes`. The counts hold for units all of whose parameters are trained; FSDP2 skips the
backward gather of a leading unit whose input and parameters need no gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dzero.comm.ledger import Entry, Traffic, sent_bytes
from dzero.mesh import REPLICATE, SHARD
from dzero.zero.layout import Layout, UnitShape

KINDS = ("param", "grad", "master", "moments")


def expected_traffic(layout: Layout, units: Sequence[UnitShape]) -> dict[Entry, Traffic]:
    """Calls and bytes sent per rank for one optimizer step, by the ledger's entries (phases unshard and reduce)."""
    totals: defaultdict[Entry, Traffic] = defaultdict(Traffic)

    def add(phase: str, kind: str, axis: str, dtype: torch.dtype, elems: int, ranks: int, calls: int) -> None:
        if ranks > 1 and elems and calls:
            moved = calls * sent_bytes(kind, elems * ranks * dtype.itemsize, ranks)
            totals[Entry(phase, kind, axis, str(dtype).removeprefix("torch."))] += Traffic(calls, moved)

    n, steps = layout.shard, layout.microbatches
    for unit in units:
        shard, trained = unit.shard_elems(n), unit.shard_elems(n, trainable_only=True)
        dtype = unit.params[0].dtype
        wire = min(layout.wire, dtype, key=lambda d: d.itemsize) if dtype != layout.param.dtype else layout.wire
        gathers = steps if layout.param.sharded else 1
        add("unshard", "all_gather", SHARD, dtype, shard, n, gathers)
        if layout.param.sharded and layout.reshard_after_forward is not False:
            inner = n if layout.reshard_after_forward is True else int(layout.reshard_after_forward)
            add("unshard", "all_gather", SHARD, dtype, unit.shard_elems(inner), inner, steps)
        add("reduce", "reduce_scatter", SHARD, wire, trained, n, steps if layout.grad.sharded else 1)
        copies = layout.replicate
        chunk = -(-trained // copies)
        add("reduce", "all_reduce", REPLICATE, layout.replicate_wire, chunk, copies, 1)
    return dict(totals)


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
