"""Pipeline parallelism: the microbatches of a step pass through the stages of the model, several at a time.

    schedule      a rank has   order                                               holds activations of at most
    gpipe         one stage    all forwards, then all backwards                    all microbatches
    1f1b          one stage    a backward as soon as there is one (PipeDream)      as many microbatches as ranks
    interleaved   several      the same, with more, smaller stages (Megatron)      more than 1f1b, waits less
    zero_bubble   several      the same, input gradients first, weight gradients   as interleaved, waits least
                               while it would wait (ZB1P, Qi et al. 2023)

torch orders the actions and moves the data (torch.distributed.pipelining). The reduction of gradients and the freeing
of units are not left to torch, which would accumulate whole gradients and keep every unit until the end of the step,
whatever the ZeRO stage. torch therefore gets plain modules, and a context of `MicrobatchHooks` wraps every backward and
takes whether it is the stage's last one. ZeRO's table (zero/layout.py) then applies inside every stage as it does
without a pipeline.

The last stage outputs its loss, so no logits wait for their backward. Tokens and targets of a microbatch are looked up
by its number. Terms that other stages add to the loss (to balance their experts) are not sent: their backward begins in
their own stage, when the gradient of its hidden states arrives.
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
from dzero.mesh_config import STAGES_PER_RANK
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
    """Contexts around the backward of one microbatch in a stage of this rank; `Sharded` implements them."""

    def microbatch(self, is_last: bool, pipeline_stage: int) -> AbstractContextManager[None]:
        """Wrap a whole backward; `is_last` marks the last one of the stage in the step."""

    def input_gradients(self, pipeline_stage: int) -> AbstractContextManager[None]:
        """Wrap a backward that computes only the gradients of inputs."""

    def weight_gradients(self, is_last: bool, pipeline_stage: int) -> AbstractContextManager[None]:
        """Wrap the later computation of the weights' gradients."""

    def unsharded_params(self, pipeline_stage: int) -> list[nn.Parameter]:
        """Return the weights that forward used."""


class Pipeline:
    """The stages of one rank, and their schedule.

    Attributes:
        microbatch: Number of the microbatch that `run` and `loss` now get, within the step, or in evaluation; None
            outside of them.

    Args:
        stages: Stages of this rank.
        group: Ranks of the pipeline.
        ledger: Counts what is sent.
        schedule: A key of `SCHEDULES`.
        microbatches: Microbatches of a step.
        hidden: Hidden states that stages exchange.
        device: Device of the stages.
        hooks: Hooks around each backward.
        run: Runs a stage on its input, tokens or hidden states.
        loss: Returns the loss of the last stage for its input and targets, an fp32 scalar.
        added: Returns what another stage adds to the loss after its `run`, an fp32 scalar or None.

    Raises:
        ValueError: If the schedule cannot order the microbatches, or the model's forward does more than call modules.
    """

    def __init__(
        self,
        stages: ModelStages,
        group: dist.ProcessGroup,
        ledger: Ledger,
        *,
        schedule: str,
        microbatches: int,
        hidden: HiddenStates,
        device: torch.device,
        hooks: MicrobatchHooks,
        run: Run,
        loss: Loss,
        added: Added = lambda _: None,
    ) -> None:
        check_microbatches(schedule, microbatches, stages.ranks)
        self._stages, self._group, self._ledger, self._hidden, self._device = stages, group, ledger, hidden, device
        self._run, self._loss, self._added, self._microbatches = run, loss, added, microbatches
        ledger.collective_log.is_pipeline = True
        self._tokens: Sequence[Tensor] = ()
        self._targets: Sequence[Tensor] = ()
        self._take: Callable[[Tensor], Tensor] = _same
        self.microbatch: int | None = None
        self._check_passing(stages.empty)
        wrapped = [_Stage(self, stage, number, hooks) for number, stage in enumerate(stages.own)]
        self._schedule = SCHEDULES[schedule](
            wrapped if STAGES_PER_RANK[schedule] > 1 else wrapped[0],
            microbatches,
            loss_fn=_loss_is_output,
            scale_grads=False,
        )

    def step(self, tokens: Sequence[Tensor], targets: Sequence[Tensor], take: Callable[[Tensor], Tensor]) -> None:
        """Run forward and backward of the step's microbatches. Collective over the pipeline.

        `take` returns the tensor to call backward on for a microbatch's loss, or for the term that a stage adds to it.

        Raises:
            ValueError: There are more or fewer microbatches than planned, or one has another shape: ranks would wait
                for each other forever.
        """
        stages = self._stages
        for what, given, is_used in (("tokens", tokens, stages.has_first), ("targets", targets, stages.has_last)):
            if len(given) != self._microbatches and (is_used or len(given)):  # ranks of other stages may give none
                planned = self._microbatches
                raise ValueError(f"{len(given)} {what}: the pipeline was planned for {planned} microbatches in a step")
            self._check_shapes(what, given)
        self._tokens, self._targets, self._take = tokens, targets, take
        numbers = torch.arange(self._microbatches)
        inputs = (numbers,) if self._stages.has_first else ()
        try:
            self._schedule.step(*inputs, target=numbers if self._stages.has_last else None, losses=[])
        finally:
            self.compute()
        self._tokens, self._targets, self._take, self.microbatch = (), (), _same, None

    @torch.no_grad()
    def evaluate(self, tokens: Tensor, targets: Tensor) -> Tensor | None:
        """Return the loss of one microbatch, number 0, without backward; None on ranks without the last stage.

        Raises:
            ValueError: The microbatch has another shape than planned: a stage would receive less than it waits for.
        """
        self._check_shapes("tokens", [tokens])
        self._check_shapes("targets", [targets])
        self.microbatch = 0
        try:
            for stage in self._stages.own:
                x = tokens if stage.index == 0 else self._receive(stage.index - 1)
                if stage.index == self._stages.count - 1:
                    return self._loss(stage.module, x, targets)
                x = self._hidden_of(stage, x)
                self._ledger.record("pipeline", "send", PIPELINE, x.dtype, x.nbytes)
                with self._ledger.collective_log.waiting():
                    dist.send(x.contiguous(), self._peer(stage.index + 1), group=self._group)
        finally:
            self.microbatch = None
        return None

    def run_stage(self, stage: ModelStage, microbatch: int, x: Tensor) -> Tensor:
        """Return the output of a stage: hidden states, or the loss [1] of the last stage."""
        self.microbatch = microbatch
        x = self._tokens[microbatch] if stage.index == 0 else x
        if stage.index == self._stages.count - 1:
            loss = self._take(self._loss(stage.module, x, self._targets[microbatch]))
            return loss.view(1).clone()  # not a view, as torch may detach it in place
        out, added = self._hidden_of(stage, x), self._added(stage.module)
        return out if added is None else _Adding.apply(out, self._take(added))  # type: ignore[no-untyped-call]

    def _hidden_of(self, stage: ModelStage, x: Tensor) -> Tensor:
        """Return the hidden states that a stage passes on; raise ValueError if they have another shape than planned."""
        out = self._run(stage.module, x)
        if out.shape != self._hidden.shape:
            raise ValueError(
                f"stage {stage.index} makes {[*out.shape]} of a microbatch of {[*x.shape]}, and the pipeline was "
                f"planned for hidden states of {[*self._hidden.shape]}: give it microbatches of that size"
            )
        return out

    def stage_of(self, stage: ModelStage) -> tuple[int, int, dict[str, Any]]:
        """Return the arguments of torch's `PipelineStage` for a stage."""
        first, last = stage.index == 0, stage.index == self._stages.count - 1
        hidden = self._hidden.on("meta").requires_grad_()
        comes = torch.empty(1, dtype=torch.int64, device="meta") if first else hidden
        goes = torch.empty(1, device="meta", requires_grad=True) if last else hidden
        shapes = {"device": self._device, "group": self._group, "input_args": comes, "output_args": goes}
        return stage.index, self._stages.count, shapes

    def count_sent(self, moves: list[dist.P2POp]) -> list[dist.P2POp]:
        """Count `moves`, which are about to begin, in the ledger and return them."""
        self.begin(moves)
        for each in moves:
            self._ledger.record("pipeline", "send", PIPELINE, each.tensor.dtype, each.tensor.nbytes)
        return moves

    def begin(self, moves: list[dist.P2POp]) -> list[dist.P2POp]:
        """Mark this rank as waiting for `moves`, if any, and return them."""
        collective_log = self._ledger.collective_log
        collective_log.moves = collective_log.moves or bool(moves)
        collective_log.transfers += bool(moves)
        return moves

    def compute(self) -> None:
        """Mark this rank as no longer waiting."""
        self._ledger.collective_log.moves = False

    def _check_shapes(self, what: str, given: Sequence[Tensor]) -> None:
        """Raise ValueError if microbatches are not all of the planned number of sequences, of one length."""
        shapes, sequences = [[*each.shape] for each in given], self._hidden.shape[0]
        for index, shape in enumerate(shapes):
            if shape != shapes[0] or shape[:1] != [sequences]:
                raise ValueError(
                    f"{what} of microbatch {index} are {shape}: the pipeline was planned for {sequences} sequences of "
                    f"one length, as {shapes[0]}; leave the rest of the data out, or fill it up"
                )

    @torch.no_grad()
    def _check_passing(self, empty: nn.Module) -> None:
        """Raise ValueError if forward changes hidden states outside its modules, as every stage would do so again."""
        x = self._hidden.on(self._device)
        x.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))
        out = self._run(empty, x.clone())
        if out.shape != x.shape or not torch.equal(out, x):
            raise ValueError(
                f"mesh.pp={self._stages.ranks}: the forward of {type(empty).__name__} changes hidden states outside "
                "of its modules, and every stage would do so; move that into a module that the plan names, or take "
                "mesh.pp=1"
            )

    def _receive(self, sender: int) -> Tensor:
        x = self._hidden.on(self._device)
        with self._ledger.collective_log.waiting():
            dist.recv(x, self._peer(sender), group=self._group)
        return x

    def _peer(self, index: int) -> int:
        return dist.get_global_rank(self._group, index % self._stages.ranks)


class _Stage(PipelineStage):
    """Stage for torch's schedules; not an FSDP2 module, because they would change its flags."""

    def __init__(self, pipeline: Pipeline, stage: ModelStage, number: int, hooks: MicrobatchHooks) -> None:
        index, count, shapes = pipeline.stage_of(stage)
        plain = _Plain(partial(pipeline.run_stage, stage), partial(hooks.unsharded_params, number))
        super().__init__(plain, index, count, **shapes)
        self._plain, self._pipeline, self._number, self._hooks = plain, pipeline, number, hooks

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **named: Any) -> Any:
        self._plain.microbatch = fwd_chunk_id
        self._pipeline.compute()
        return super().forward_one_chunk(fwd_chunk_id, *args, **named)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._pipeline.compute()
        if full_backward:
            around = self._hooks.microbatch(last_backward, self._number)
        else:
            around = self._hooks.input_gradients(self._number)
        with around:
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Compute weight gradients; the first stage, without input gradients, runs its whole backward."""
        self._pipeline.compute()
        whole = self._hooks.microbatch if self.is_first else self._hooks.weight_gradients
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
    """Module that runs a stage without having it as a child.

    `run` takes the number of a microbatch and the stage's input. `weights` returns the parameters whose gradients torch
    computes separately from those of inputs.
    """

    def __init__(self, run: Callable[[int, Tensor], Tensor], weights: Callable[[], list[nn.Parameter]]) -> None:
        super().__init__()
        self.microbatch, self._run, self._weights = 0, run, weights

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(self._weights())

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.microbatch, x)


class _Adding(torch.autograd.Function):
    """Identity on hidden states; their backward also starts that of `loss`, an fp32 scalar."""

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
