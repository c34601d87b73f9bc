"""Gradients in a pipeline: the rank that counts each one for the norm, and the sum over both ends for tied parameters.

    parameter of            gradient                                  counted for the norm by
    one pipeline stage      that rank's                               that rank
    the first and the       the sum of both, added in stage order     the first rank
    last stage (tied)       after the last backward of either;
                            none if neither end has one

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
        at: Positions of this rank's owned parameters in `names`.
    """

    def __init__(self, sharded: Sharded, owned: Sequence[str], units: Sequence[UnitGrads]) -> None:
        stages, group = sharded.stages, sharded.model_groups[PIPELINE]
        assert stages is not None
        self.names = stages.names
        self._group, self._ledger = group, sharded.ledger
        self._device = torch.device(sharded.mesh.device_type)
        self._gather = GatherScalars(group, PIPELINE, sharded.ledger)
        position = {name: number for number, name in enumerate(stages.names)}
        self.at = torch.tensor([position[name] for name in owned], dtype=torch.int64)
        self._counts = torch.tensor([stages.has_first or name not in stages.shared for name in owned])
        unit_of = {name: grads for unit, grads in zip(sharded.units, units, strict=True) for name in unit.params}
        self._shared = [(name, unit_of[name]) for name in stages.shared if name in owned]
        self._added: tuple[int, ...] | None = None

    def complete(self) -> None:
        """Add the other end's gradients of tied parameters, once per step; call this after `complete` of every unit.

        Raises:
            RuntimeError: Gradients of a tied parameter arrived since they were added.
        """
        reductions = tuple(unit.reductions for _, unit in self._shared)
        if self._added is None:
            for name, unit in self._shared:
                unit.complete_with(name, self._add_both)
            self._added = reductions
        if self._added != reductions:
            raise RuntimeError(
                f"{self._shared[0][0]}: a backward after the gradients of both ends of the pipeline were added, as for "
                "a norm: clip after the step's last backward"
            )

    def end_step(self) -> None:
        """End the step, so that the next one adds anew."""
        self._added = None

    def gather(self, sums: torch.Tensor) -> torch.Tensor:
        """Gather sums [owned], fp64 on the CPU, as [ranks, names]; zero for parameters that a rank does not count.

        Signs are kept, also those of the zeros.
        """
        own = torch.zeros(len(self.names), dtype=torch.float64)
        own[self.at] = torch.where(self._counts, sums, torch.zeros_like(sums).copysign(sums))
        return self._gather(own.to(self._device)).cpu()

    def _add_both(self, grad: torch.Tensor, is_here: bool) -> bool:
        """Add the gradient of the other end in place; return whether either end has one, else both are zeros."""
        first, last = 0, self._group.size() - 1
        is_first = self._group.rank() == first
        peer = dist.get_global_rank(self._group, last if is_first else first)
        mine = grad.contiguous(), torch.tensor([is_here], dtype=torch.uint8, device=grad.device)
        theirs = [torch.empty_like(each) for each in mine]
        moves = [dist.P2POp(dist.isend, each, peer, self._group) for each in mine]
        moves += [dist.P2POp(dist.irecv, each, peer, self._group) for each in theirs]
        self._ledger.record("reduce", "exchange", PIPELINE, grad.dtype, sum(each.nbytes for each in mine))
        with self._ledger.collective_log.waiting():
            for work in dist.batch_isend_irecv(moves):
                work.wait()
        ordered = (mine[0], theirs[0]) if is_first else (theirs[0], mine[0])
        grad.copy_(ordered[0].float() + ordered[1].float())
        return is_here or bool(theirs[1].item())
