"""Gradients in a pipeline: the rank that counts each one for the norm, and the sum over both ends for tied parameters.

    parameter of            gradient                                  counted for the norm by
    one pipeline stage      that rank's                               that rank
    the first and the       the sum of both, added in stage order     the first rank
    last stage (tied)       after the last backward of either

Both ends then apply the same update to the same values, so tied parameters stay equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from dzero.comm.collectives import GatherScalars
from dzero.mesh import PIPELINE
from dzero.optim.grad_accumulation import UnitGrads
from dzero.zero.sharded import Sharded


class PipelineGrads:
    """Gradients of one rank of a pipeline; every rank of the pipeline creates one.

    Args:
        sharded: The sharded model.
        owned: Names of the parameters that are trained on this rank.
        units: Gradients of the model's units.

    Attributes:
        names: Names of the parameters of all stages.
    """

    def __init__(self, sharded: Sharded, owned: Sequence[str], units: Sequence[UnitGrads]) -> None:
        stages, group = sharded.stages, sharded.model_groups[PIPELINE]
        assert stages is not None
        self.names = stages.names
        self._group, self._ledger = group, sharded.ledger
        self._device = torch.device(sharded.mesh.device_type)
        self._gather = GatherScalars(group, PIPELINE, sharded.ledger)
        position = {name: number for number, name in enumerate(stages.names)}
        self._at = torch.tensor([position[name] for name in owned], dtype=torch.int64)
        self._counts = torch.tensor([stages.has_first or name not in stages.shared for name in owned])
        unit_of = {name: grads for unit, grads in zip(sharded.units, units, strict=True) for name in unit.params}
        self._shared = [(name, unit_of[name]) for name in stages.shared if name in owned]

    def complete(self) -> None:
        """Add the other end's gradients of tied parameters; call this after `complete` of every unit."""
        for name, unit in self._shared:
            unit.complete_with(name, self._add_both)

    def gather(self, sums: torch.Tensor) -> torch.Tensor:
        """Gather sums [owned], fp64 on the CPU, as [ranks, names]; zero for parameters that a rank does not count."""
        own = torch.zeros(len(self.names), dtype=torch.float64)
        own[self._at] = torch.where(self._counts, sums, 0.0)
        return self._gather(own.to(self._device)).cpu()

    def _add_both(self, grad: torch.Tensor) -> None:
        first, last = 0, self._group.size() - 1
        is_first = self._group.rank() == first
        peer = dist.get_global_rank(self._group, last if is_first else first)
        mine, theirs = grad.contiguous(), torch.empty_like(grad)
        moves = [dist.P2POp(move, each, peer, self._group) for move, each in ((dist.isend, mine), (dist.irecv, theirs))]
        self._ledger.record("reduce", "exchange", PIPELINE, grad.dtype, grad.nbytes)
        with self._ledger.collective_log.waiting():
            for work in dist.batch_isend_irecv(moves):
                work.wait()
        ordered = (mine, theirs) if is_first else (theirs, mine)
        grad.copy_(ordered[0].float() + ordered[1].float())
