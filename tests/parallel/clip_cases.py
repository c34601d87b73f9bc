"""Three steps of SGD clipped to a norm, on the meshes of `MESHES` for the pool's workers, and in one plain process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import expert_cases
import pipeline_cases
import tensor_cases
import torch
from parity_cells import whole
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import dzero
from dzero.mesh import data_rank_of
from dzero.models.meta_init import MetaInitializer

STEPS, LR = 3, 0.3
MAX_NORMS = {1.0: 5.0, 2.0: 0.2, 3.0: 0.05, math.inf: 0.02}
"""Norm to clip to, by type, below those of all steps of every model."""


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """`mesh`: a key of `MESHES`. by: who clips. poison: factor of the head's gradient in the last step.
    replicate: replicas of stages 1 to 3. axes: those that states are cut along."""

    mesh: str
    norm_type: float
    stage: int = 2
    offload: str = "device"
    by: str = "torch"
    poison: float = 0.0
    tied: bool = False
    replicate: int = 1
    axes: tuple[str, ...] = ("shard",)

    @property
    def ranks(self) -> int:
        pp, dp, tp = MESHES[self.mesh]
        return pp * dp * tp


MESHES = {
    "dp2": (1, 2, 1),
    "dp3": (1, 3, 1),
    "tp2": (1, 1, 2),
    "pp2": (2, 1, 1),
    "ep2": (1, 2, 1),
    "dp2 tp2": (1, 2, 2),
    "dp4": (1, 4, 1),
}
"""(pp, dp, tp) ranks."""


class Judge(nn.Module):
    """A reward model: its head has one row, so that all ranks but the first have none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 7)
        self.head = nn.Linear(7, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def judge() -> Judge:
    torch.manual_seed(3)
    return Judge()


def judged(ranks: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[*of_step] for of_step in torch.randn(STEPS, ranks, 4, 5, generator=generator)]


@dataclass(frozen=True)
class Side:
    """A model's parameters by name, an optimizer, and `backward(step)`, which leaves the gradients of a step."""

    params: dict[str, nn.Parameter]
    optim: torch.optim.Optimizer
    backward: Callable[[int], object]


class _NoStep:
    def step(self) -> None:
        """Leave the gradients to who clips them."""


def in_dzero(case: Clipped) -> Side:
    """Return this rank's side."""
    pp, dp, tp = MESHES[case.mesh]
    if case.mesh == "ep2":
        run = experts_of(case)
        mixture = expert_cases.build(run)
        mixture.optim = _NoStep()  # type: ignore[assignment]
        sharded, mixed = mixture.sharded, expert_cases.batches(run, STEPS)

        def backward(step: int) -> None:
            expert_cases.one_step(run, mixture, mixed[step][data_rank_of(sharded.mesh)])

    elif pp * tp > 1:
        kind = {"stage": case.stage, "offload": case.offload, "tied": case.tied}
        made = pipeline_cases.build(pipeline_cases.Piped(pp=pp, dp=dp, tp=tp, **kind))  # type: ignore[arg-type]
        object.__setattr__(made, "optim", _NoStep())
        sharded, texts = made.sharded, tensor_cases.batches(STEPS, dp, made.run.microbatches)

        def backward(step: int) -> None:
            pipeline_cases.one_step(made, texts[step][data_rank_of(sharded.mesh)])

    else:
        sharded = dzero.shard(
            judge(),
            dzero.ZeroConfig(stage=case.stage, optimizer_shard_axes=[*case.axes]),
            mesh=dzero.make_mesh("cpu", replicate=dp if case.stage == 0 else case.replicate),
            precision="fp32",
            offload=dzero.OffloadConfig(**dict.fromkeys(("grad", "master", "moments"), case.offload)),
        )
        inputs = judged(dp)

        def backward(step: int) -> None:
            sharded.model(inputs[step][data_rank_of(sharded.mesh)]).mean().backward()

    params = sharded.named_params()
    if len(case.axes) > 1:  # which only AdamW does
        return Side(params, dzero.AdamW(sharded), backward)
    return Side(params, dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=LR), backward)


def experts_of(case: Clipped) -> expert_cases.Run:
    return expert_cases.Run(dp=2, ep=2, stage=case.stage, offload=case.offload, balance="none")


def in_torch(case: Clipped) -> Side:
    """Return one process's side."""
    pp, dp, tp = MESHES[case.mesh]
    model: Any
    if case.mesh == "ep2":
        model = filled(expert_cases.model_on_meta(experts_of(case)))
        mixed = expert_cases.batches(experts_of(case), STEPS)

        def losses(step: int) -> list[Tensor]:
            return [expert_cases.loss_of(model, each[:, :-1], each[:, 1:]) for (each,) in mixed[step]]

    elif pp * tp > 1:
        model = filled(pipeline_cases.model_of(pipeline_cases.Piped(stage=0, tied=case.tied)))
        texts = tensor_cases.batches(STEPS, dp, 4)

        def losses(step: int) -> list[Tensor]:
            return [tensor_cases.loss_of(model, each) for rank in texts[step] for each in rank]

    else:
        model, inputs = judge(), judged(dp)

        def losses(step: int) -> list[Tensor]:
            return [model(x).mean() for x in inputs[step]]

    params = dict(model.named_parameters())
    optim = torch.optim.SGD(params.values(), lr=LR)
    return Side(params, optim, lambda step: torch.stack(losses(step)).mean().backward())  # type: ignore[no-untyped-call]


def filled(model: nn.Module) -> nn.Module:
    MetaInitializer(model, seed=0, device="cpu")(model)
    return model


def train(side: Side, case: Clipped, *, plain: bool) -> dict[str, Any]:
    """Return norms of all gradients before and after clipping and of the head's, and the parameters at the end."""
    clip: Any = torch.nn.utils.clip_grad_norm_ if plain or case.by == "torch" else dzero.clip_grad_norm_
    given: Any = side.optim if case.by == "optimizer" and not plain else [*side.params.values()]
    found: dict[str, Any] = {"norms": [], "clipped": [], "heads": [], "error": ""}
    limit, p = MAX_NORMS[case.norm_type], case.norm_type
    heads = [param for name, param in side.params.items() if "head" in name]
    for step in range(STEPS):
        side.backward(step)
        is_poisoned = bool(case.poison) and step == STEPS - 1
        for param in heads if is_poisoned else ():
            assert param.grad is not None
            param.grad.mul_(case.poison)
        found["heads"].append(number(torch.nn.utils.get_total_norm(grads(heads), p)))
        if is_poisoned:
            with suppress_as(found):
                clip(given, limit, p, error_if_nonfinite=True)
        found["norms"].append(number(clip(given, limit, p)))
        if not is_poisoned:
            found["clipped"].append(number(torch.nn.utils.get_total_norm(grads(side.params.values()), p)))
            side.optim.step()
            side.optim.zero_grad()
    getattr(side.optim, "synchronize", lambda: None)()
    return found | {"params": {name: whole(param).clone() for name, param in side.params.items()}}


@contextmanager
def suppress_as(found: dict[str, Any]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        found["error"] = str(error)


def grads(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def number(norm: Tensor) -> float:
    return float(whole(norm))


def of_rank(rank: int, ranks: int, cases: list[Clipped]) -> list[dict[str, Any]]:
    """What this rank finds, case by case."""
    return [train(in_dzero(case), case, plain=False) for case in cases]


def of_one_process(case: Clipped) -> dict[str, Any]:
    """What plain torch finds."""
    return train(in_torch(case), case, plain=True)


def of_copies(rank: int, ranks: int, case: Clipped) -> str:
    """Return how a norm of copies of the gradients is refused, of which this rank may have none."""
    side, found = in_dzero(case), {"error": ""}
    side.backward(0)
    with suppress_as(found):
        torch.nn.utils.get_total_norm([grad.float() * 1.0 for grad in grads(side.params.values())])
    return found["error"]


def of_parts(rank: int, ranks: int) -> tuple[float, float, str]:
    """Return the norm of two parts, of which the last microbatch reaches one; that of the step; a refusal.

    The refusal is that of a norm of the `.grad` that are set after the backward.
    """
    units = dzero.ZeroConfig(stage=2, units=lambda each: isinstance(each, nn.Linear))
    sharded = dzero.shard(Parts(), units, microbatches=2, precision="fp32")
    optim = dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=LR, max_norm=1e9)
    norms, found = [], {"error": ""}
    for by_tensors in (True, False):
        for index in range(2):
            with sharded.microbatch(is_last=index == 1):
                sharded.model(torch.ones(2, 3) + rank, last=index == 1).sum().backward()
            if index == 0:
                assert number(torch.nn.utils.clip_grad_norm_(sharded.model.parameters(), 1e-3)) == 0
        if by_tensors:
            with suppress_as(found):
                torch.nn.utils.get_total_norm(grads(sharded.named_params().values()))
            optim.zero_grad()
            continue
        norms.append(number(torch.nn.utils.clip_grad_norm_(sharded.model.parameters(), 1e9)))
        optim.step()
    assert optim.last_decision is not None
    return norms[0], optim.last_decision.norm, found["error"]


def of_types(rank: int, ranks: int, case: Clipped) -> list[float]:
    """Return the norm of each type of the first step's gradients, and that of copies of them."""
    return norms_of(in_dzero(case))


def norms_of(side: Side) -> list[float]:
    side.backward(0)
    norms = []
    for p in MAX_NORMS:
        norms.append(number(torch.nn.utils.clip_grad_norm_(side.params.values(), 1e9, p)))
        norms.append(number(torch.nn.utils.get_total_norm([grad * 2.0 for grad in grads(side.params.values())], p)))
    return norms


def by_early_names(rank: int, ranks: int) -> list[float]:
    """Return the norm by torch's function as it was imported before any model was sharded, by torch's, and by ours."""
    early = clip_grad_norm_
    side = in_dzero(Clipped(mesh="pp2", norm_type=2.0))
    side.backward(0)
    functions: list[Any] = [early, torch.nn.utils.clip_grad_norm_, dzero.clip_grad_norm_]
    return [number(clip(side.params.values(), 1e9)) for clip in functions]


class Parts(nn.Module):
    """Two parts, of which the last microbatch reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, last: bool) -> Tensor:
        out: Tensor = self.first(x) if last else self.first(self.second(x))
        return out
