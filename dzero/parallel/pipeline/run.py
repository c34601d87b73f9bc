"""Pipeline parallelism: the microbatches of a step travel through the parts of the model, several at a time.

    schedule      a rank has   runs                                                holds activations of at most
    gpipe         one part     all forwards, then all backwards                    all microbatches
    1f1b          one part     a backward as soon as there is one (PipeDream)      as many microbatches as ranks
    interleaved   several      the same, with more and smaller parts (Megatron)    more than 1f1b, waits less
    zero_bubble   several      the same, gradients of inputs first; those of       as interleaved, waits least
                               weights where it would wait (ZB1P, Qi et al. 2023)

The order of actions and the moves are torch's (torch.distributed.pipelining). When gradients are reduced and units are
freed is not: torch would accumulate whole gradients and keep every unit until the step's end, whatever the stage. So it
sees plain modules, and a `MicrobatchHooks` is around every backward, told whether it is the part's last: that of ZeRO's
table then holds inside every part as it does without a pipeline.

What comes out of the last part is its loss, so no logits wait for their backward. The rest of a microbatch, tokens and
targets, is looked up by its number. What other parts add to the loss (to balance their experts) does not travel: its
backward begins in their own, where the gradient of their hidden states comes in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from dzero.comm.ledger import Ledger
from dzero.mesh import PIPELINE
from dzero.mesh_config import PARTS_OF_A_RANK
from dzero.parallel.divisibility import check_microbatches
from dzero.parallel.pipeline.schedule import HiddenStates
from dzero.parallel.pipeline.split import ModelStage, ModelStages

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
}
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
Added = Callable[[nn.Module], Tensor | None]
Run = Callable[[nn.Module, Tensor], Tensor]


class MicrobatchHooks(Protocol):
    """What happens around the backward of one microbatch in a part, by its number on this rank: `Sharded`."""

    def microbatch(self, is_last: bool, part: int) -> AbstractContextManager[None]:
        """Around all of it."""

    def input_gradients(self, part: int) -> AbstractContextManager[None]:
        """Around that of inputs alone."""

    def weight_gradients(self, is_last: bool, part: int) -> AbstractContextManager[None]:
        """Around what makes those of weights, afterwards."""

    def unsharded_params(self, part: int) -> list[nn.Parameter]:
        """The weights, as forward used them."""


class Pipeline:
    """The parts of one rank, and their schedule.

    cadence: around each backward. run: a part on its input, tokens or hidden states. loss: of the last part on its
    input and targets, fp32 scalar. added: by any other part to that, after its `run`, fp32 scalar; None for nothing.
    Raises ValueError for microbatches that the schedule cannot order, and a model that does more than call its modules.
    """

    def __init__(
        self,
        parts: ModelStages,
        group: dist.ProcessGroup,
        ledger: Ledger,
        *,
        schedule: str,
        microbatches: int,
        hidden: HiddenStates,
        device: torch.device,
        cadence: MicrobatchHooks,
        run: Run,
        loss: Loss,
        added: Added = lambda _: None,
    ) -> None:
        check_microbatches(schedule, microbatches, parts.ranks)
        self._parts, self._group, self._ledger, self._hidden, self._device = parts, group, ledger, hidden, device
        self._run, self._loss, self._added, self._microbatches = run, loss, added, microbatches
        ledger.collective_log.of_parts = True
        self._tokens: Sequence[Tensor] = ()
        self._targets: Sequence[Tensor] = ()
        self._take: Callable[[Tensor], Tensor] = _same
        self._check_passing(parts.empty)
        stages = [_Stage(self, part, number, cadence) for number, part in enumerate(parts.own)]
        self._schedule = SCHEDULES[schedule](
            stages if PARTS_OF_A_RANK[schedule] > 1 else stages[0],
            microbatches,
            loss_fn=_loss_is_output,
            scale_grads=False,
        )

    def step(self, tokens: Sequence[Tensor], targets: Sequence[Tensor], take: Callable[[Tensor], Tensor]) -> None:
        """Forward and backward of the step's microbatches, on all ranks of the pipeline.

        take: what to call backward on instead of the loss of a microbatch, or what a part adds to it.
        """
        self._tokens, self._targets, self._take = tokens, targets, take
        numbers = torch.arange(self._microbatches)
        inputs = (numbers,) if self._parts.has_first else ()
        try:
            self._schedule.step(*inputs, target=numbers if self._parts.has_last else None, losses=[])
        finally:
            self.compute()
        self._tokens, self._targets, self._take = (), (), _same

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """The loss of one microbatch, forward alone; None where the last part is elsewhere."""
        for part in self._parts.own:
            x = tokens if part.index == 0 else self._receive(part.index - 1)
            if part.index == self._parts.count - 1:
                return self._loss(part.module, x, targets)
            x = self._run(part.module, x)
            self._ledger.record("pipeline", "send", PIPELINE, x.dtype, x.nbytes)
            with self._ledger.collective_log.waiting():
                dist.send(x.contiguous(), self._peer(part.index + 1), group=self._group)
        return None

    def of_part(self, part: ModelStage, microbatch: int, x: Tensor) -> Tensor:
        """What travels on: hidden states, or the loss [1] of the last part."""
        x = self._tokens[microbatch] if part.index == 0 else x
        if part.index == self._parts.count - 1:
            loss = self._take(self._loss(part.module, x, self._targets[microbatch]))
            return loss.view(1).clone()  # no view: torch may detach it in place
        out, added = self._run(part.module, x), self._added(part.module)
        return out if added is None else _Adding.apply(out, self._take(added))  # type: ignore[no-untyped-call]

    def stage_of(self, part: ModelStage) -> tuple[int, int, dict[str, Any]]:
        """What torch wants to know of a part."""
        first, last = part.index == 0, part.index == self._parts.count - 1
        hidden = self._hidden.on("meta").requires_grad_()
        comes = torch.empty(1, dtype=torch.int64, device="meta") if first else hidden
        goes = torch.empty(1, device="meta", requires_grad=True) if last else hidden
        shapes = {"device": self._device, "group": self._group, "input_args": comes, "output_args": goes}
        return part.index, self._parts.count, shapes

    def count_sent(self, moves: list[dist.P2POp]) -> list[dist.P2POp]:
        """`moves`, which are about to begin."""
        self.begin(moves)
        for each in moves:
            self._ledger.record("pipeline", "send", PIPELINE, each.tensor.dtype, each.tensor.nbytes)
        return moves

    def begin(self, moves: list[dist.P2POp]) -> list[dist.P2POp]:
        """`moves`, for which this rank waits before it computes again."""
        self._ledger.collective_log.moves = self._ledger.collective_log.moves or bool(moves)
        return moves

    def compute(self) -> None:
        """What was waited for has come."""
        self._ledger.collective_log.moves = False

    @torch.no_grad()
    def _check_passing(self, empty: nn.Module) -> None:
        """A part runs the model's own forward: what that does besides calling modules, every part would do again."""
        x = self._hidden.on(self._device)
        x.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))
        out = self._run(empty, x.clone())
        if out.shape != x.shape or not torch.equal(out, x):
            raise ValueError(
                f"mesh.pp={self._parts.ranks}: the forward of {type(empty).__name__} changes hidden states outside "
                "of its modules, and every part would do so; move that into a module that the plan names, or take "
                "mesh.pp=1"
            )

    def _receive(self, sender: int) -> Tensor:
        x = self._hidden.on(self._device)
        with self._ledger.collective_log.waiting():
            dist.recv(x, self._peer(sender), group=self._group)
        return x

    def _peer(self, index: int) -> int:
        return dist.get_global_rank(self._group, index % self._parts.ranks)


class _Stage(PipelineStage):
    """A part as torch's schedules know it: not as a module of FSDP2, whose switches they would set."""

    def __init__(self, pipeline: Pipeline, part: ModelStage, number: int, cadence: MicrobatchHooks) -> None:
        index, count, shapes = pipeline.stage_of(part)
        plain = _Plain(partial(pipeline.of_part, part), partial(cadence.unsharded_params, number))
        super().__init__(plain, index, count, **shapes)
        self._plain, self._pipeline, self._number, self._cadence = plain, pipeline, number, cadence

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        self._plain.microbatch = fwd_chunk_id
        self._pipeline.compute()
        return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._pipeline.compute()
        if full_backward:
            around = self._cadence.microbatch(last_backward, self._number)
        else:
            around = self._cadence.input_gradients(self._number)
        with around:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Of the first part all: it has no inputs with gradients."""
        self._pipeline.compute()
        whole = self._cadence.microbatch if self.is_first else self._cadence.weight_gradients
        with whole(last_backward, self._number):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._pipeline.begin(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._pipeline.begin(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._pipeline.count_sent(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._pipeline.count_sent(super().get_bwd_send_ops(bwd_chunk_id))


class _Plain(nn.Module):
    """Runs a part that it does not hold as a child. run: on the number of a microbatch, and what comes in. weights:
    those of which torch makes gradients where inputs and weights have a backward of their own."""

    def __init__(self, run: Callable[[int, Tensor], Tensor], weights: Callable[[], list[nn.Parameter]]) -> None:
        super().__init__()
        self.microbatch, self._run, self._weights = 0, run, weights

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._weights())

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.microbatch, x)


class _Adding(torch.autograd.Function):
    """Hidden states themselves; with their backward begins that of `loss`, fp32 scalar."""

    @staticmethod
    def forward(_: Any, hidden: Tensor, loss: Tensor) -> Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), device=grads[0].device)


def _same(loss: Tensor) -> Tensor:
    return loss


def _loss_is_output(output: Tensor, _: Tensor) -> Tensor:
    return output
