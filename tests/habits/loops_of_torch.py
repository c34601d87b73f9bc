"""Training loops with habits of torch users: the same function runs on plain torch and on a sharded model.

A habit is a function of `Step`, called at named moments of every step. For pool workers, so importable by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import small_decoders
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from training_loops import sharded_net

from dzero import AdamW, OffloadConfig, Sharded, TorchOptimizer
from dzero.optim.base import MasterOptimizer

STEPS, RATE = 4, 1e-3
OPTIONS = {"lr": RATE, "betas": (0.9, 0.95), "eps": 1e-3, "weight_decay": 0.1}
"""With an eps far above the rounding of gradients, which AdamW would else blow up where they are near zero. So the
scale of gradients counts as well."""
HOST = {"grad": "host", "master": "host", "moments": "host"}


@dataclass
class Step:
    """What a habit may use: the model, and `extra`, which it may set to a term of the microbatch's loss."""

    model: nn.Module
    microbatches: int
    extra: Tensor | None = None

    @property
    def params(self) -> list[nn.Parameter]:
        """The parameters as the model has them now."""
        return [*self.model.parameters()]


def whole(value: Tensor) -> Tensor:
    """A DTensor's full value, with its graph; any other tensor itself."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def penalty(step: Step) -> Tensor:
    """The sum of squares of all parameters, divided by the microbatches."""
    squares = [whole((param.float() ** 2).sum()) for param in step.params]
    return 0.1 * torch.stack(squares).sum() / step.microbatches


def read_before(step: Step, moment: str) -> None:
    """A penalty on weights that are read before the forward."""
    if moment == "before forward":
        step.extra = penalty(step)


def read_after(step: Step, moment: str) -> None:
    """A penalty on weights that are read after the forward."""
    if moment == "after forward":
        step.extra = penalty(step)


def own_backward_first(step: Step, moment: str) -> None:
    """A penalty with a backward of its own before the forward."""
    if moment == "before forward":
        penalty(step).backward()


def own_backward_last(step: Step, moment: str) -> None:
    """A penalty with a backward of its own before the step."""
    if moment == "before step":
        penalty(step).backward()


def clip_norm(step: Step, moment: str) -> None:
    """torch's own clipping of the norm."""
    if moment == "before step":
        norm = whole(torch.nn.utils.clip_grad_norm_(step.params, 0.5))
        assert float(norm) > 0.5


def clip_norm_in_a_loop(step: Step, moment: str) -> None:
    """The same without foreach."""
    if moment == "before step":
        torch.nn.utils.clip_grad_norm_(step.params, 0.5, foreach=False)


def clip_value(step: Step, moment: str) -> None:
    """torch's own clipping of values."""
    if moment == "before step":
        torch.nn.utils.clip_grad_value_(step.params, 1e-3)


def scale_by_hand(step: Step, moment: str) -> None:
    """Gradients scaled and shifted in place."""
    if moment == "before step":
        for param in step.params:
            assert param.grad is not None
            param.grad.mul_(0.5).add_(1e-3)


def assign(step: Step, moment: str) -> None:
    """Another tensor as the gradient."""
    if moment == "before step":
        for param in step.params:
            assert param.grad is not None
            param.grad = param.grad.sign() * 1e-3


def drop(step: Step, moment: str) -> None:
    """Some parameters are not to be updated."""
    if moment == "before step":
        for param in step.params[::2]:
            param.grad = None


def clip_after_penalty(step: Step, moment: str) -> None:
    """Both."""
    own_backward_last(step, moment)
    clip_norm(step, moment)


HABITS: dict[str, Callable[[Step, str], None]] = {
    each.__name__: each
    for each in (
        read_before,
        read_after,
        own_backward_first,
        own_backward_last,
        clip_norm,
        clip_norm_in_a_loop,
        clip_value,
        scale_by_hand,
        assign,
        drop,
        clip_after_penalty,
    )
}


def in_torch(habit: str, ranks: int, microbatches: int, net: str = "even") -> dict[str, Tensor]:
    """The parameters that one process of plain torch ends with, on the batches of all ranks."""
    model = small_decoders.build(net)
    optim = torch.optim.AdamW(model.parameters(), **OPTIONS)  # type: ignore[arg-type]
    step, do = Step(model, microbatches), HABITS[habit]
    for of_step in small_decoders.batches(net, steps=STEPS, ranks=ranks, microbatches=microbatches):
        optim.zero_grad()
        for index in range(microbatches):
            do(step, "before forward")
            losses = [small_decoders.loss_fn(model, of_step[rank][index]) for rank in range(ranks)]
            do(step, "after forward")
            _backward(step, torch.stack(losses).mean())
        do(step, "before step")
        optim.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def in_dzero(
    rank: int, ranks: int, habit: str, stage: int, microbatches: int, offload: dict[str, str], net: str = "even"
) -> dict[str, Tensor]:
    """The same of a sharded model, on this rank's batches."""
    tiers = OffloadConfig(**offload) if offload else None
    sharded = sharded_net(net, stage=stage, microbatches=microbatches, param="fp32", offload=tiers)
    optim = AdamW(sharded, **OPTIONS)  # type: ignore[arg-type]
    step, do = Step(sharded.model, microbatches), HABITS[habit]
    for of_step in small_decoders.batches(net, steps=STEPS, ranks=ranks, microbatches=microbatches):
        optim.zero_grad()
        for index in range(microbatches):
            with sharded.microbatch(is_last=index == microbatches - 1):
                do(step, "before forward")
                loss = small_decoders.loss_fn(sharded.model, of_step[dist.get_rank()][index])
                do(step, "after forward")
                _backward(step, loss)
        do(step, "before step")
        optim.step()
    optim.synchronize()
    return {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}


def _backward(step: Step, loss: Tensor) -> None:
    loss = loss / step.microbatches
    (loss if step.extra is None else loss + step.extra).backward()  # type: ignore[no-untyped-call]
    step.extra = None


LIMIT = 0.01
EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda param: param.clamp_(-LIMIT, LIMIT),
    "of data": lambda param: param.data.clamp_(-LIMIT, LIMIT),
    "by foreach": lambda param: (
        torch._foreach_clamp_max_([param], LIMIT),
        torch._foreach_clamp_min_([param], -LIMIT),
    ),
    "copied": lambda param: param.copy_(param.clamp(-LIMIT, LIMIT)),
}


def edited(
    rank: int, ranks: int, stage: int, rule: str, precision: dict[str, str], offload: dict[str, str]
) -> dict[str, dict[str, Tensor]]:
    """By edit: the parameters two steps after all of them were clamped to `LIMIT`."""
    found = {}
    for edit, do in EDITS.items():
        tiers = OffloadConfig(**offload) if offload else None
        sharded = sharded_net(stage=stage, offload=tiers, **precision)
        optim = build_rule(sharded, rule)
        drawn = small_decoders.batches("even", steps=4, ranks=ranks, microbatches=1)
        for number, of_step in enumerate(drawn):
            if number == 2:
                with torch.no_grad():
                    for param in sharded.model.parameters():
                        do(param)
            small_decoders.loss_fn(sharded.model, of_step[dist.get_rank()][0]).backward()  # type: ignore[no-untyped-call]
            optim.step()
        optim.synchronize()
        found[edit] = {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}
    return found


def build_rule(sharded: Sharded, rule: str) -> MasterOptimizer:
    """An optimizer whose steps move an element by little more than `RATE`."""
    if rule == "adamw":
        return AdamW(sharded, **OPTIONS)  # type: ignore[arg-type]
    return TorchOptimizer(sharded, torch.optim.AdamW, lr=RATE)
