"""The norm that gradients are clipped to is that of all ranks: on every mesh, of any type, as in one plain process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import cut_runs
import decoders
import pytest
import small_decoders
import torch
import training_loops
from cut_runs import Run
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import dzero

STEPS, LR = 2, 0.3
MAX_NORMS = {1.0: 5.0, 2.0: 0.2, 3.0: 0.05, math.inf: 0.02}
"""Norm to clip to, by type, below those of all steps of every model."""
PIPED = {"pp": 2, "layers": 4, "microbatches": 4}
MESHES: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "dp3": {"dp": 3},
    "tp2": {"tp": 2},
    "pp2": PIPED,
    "ep2": {"dp": 2, "ep": 2, "experts": 4, "balance": "none"},
    "dp2 tp2": {"dp": 2, "tp": 2},
    "tied": {**PIPED, "tied": True},
}
"""Settings of runs; data-parallel ranks alone train a net of which some parameters have one row."""


@dataclass(frozen=True, kw_only=True)
class Clipped:
    """`mesh`: a key of `MESHES`. by: who clips. poison: factor of some gradients in the last step."""

    mesh: str
    norm_type: float = 2.0
    stage: int = 2
    offload: str = "device"
    by: str = "torch"
    poison: float = 0.0

    @property
    def run(self) -> Run:
        return Run(stage=self.stage, offload=self.offload, **MESHES[self.mesh])

    @property
    def poisoned(self) -> str:
        """Part of the names of the parameters whose gradients are."""
        return "gain" if self.mesh.startswith("dp") and "tp" not in self.mesh else "head"


@dataclass(frozen=True)
class Side:
    """A model's parameters by name, an optimizer, and `backward(step)`, which leaves the gradients of a step."""

    params: dict[str, nn.Parameter]
    optim: torch.optim.Optimizer
    backward: Callable[[int], object]


def sgd(sharded: dzero.Sharded) -> dzero.TorchOptimizer:
    return dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=LR)


def of_net(rank: int, ranks: int, optimizer: Callable[[dzero.Sharded], Any] = sgd, **settings: Any) -> Side:
    """The net whose parameters have one row each, over data-parallel ranks."""
    sharded = training_loops.sharded_net("uneven", param="fp32", **settings)
    optim, drawn = optimizer(sharded), small_decoders.batches("uneven", steps=STEPS, ranks=ranks, microbatches=1)
    return Side(sharded.named_params(), optim, lambda step: training_loops.backward(sharded, optim, drawn[step][rank]))


def in_dzero(rank: int, case: Clipped) -> Side:
    run = case.run
    if case.poisoned == "gain":
        tiers = dzero.OffloadConfig(**dict.fromkeys(("grad", "master", "moments"), case.offload))
        return of_net(rank, run.dp, stage=case.stage, offload=tiers)
    made = cut_runs.build(run, sgd)
    own = [of_step[cut_runs.reader_of(run)] for of_step in cut_runs.batches(STEPS, run.dp, run.microbatches)]
    return Side(made.sharded.named_params(), made.optim, lambda step: cut_runs.backward(run, made, own[step]))


def in_torch(case: Clipped) -> Side:
    """One process's side."""
    run, model, loss_of = case.run, cut_runs.model_of(case.run), cut_runs.loss_of
    drawn = cut_runs.batches(STEPS, run.dp, run.microbatches)
    if case.poisoned == "gain":
        model, loss_of = small_decoders.build("uneven"), small_decoders.loss_fn
        drawn = small_decoders.batches("uneven", steps=STEPS, ranks=run.dp, microbatches=1)
    else:
        decoders.filling(model)(model)
    params = dict(model.named_parameters())

    def backward(step: int) -> None:
        losses = [loss_of(model, batch) for of_rank in drawn[step] for batch in of_rank]
        torch.stack(losses).mean().backward()  # type: ignore[no-untyped-call]

    return Side(params, torch.optim.SGD(params.values(), lr=LR), backward)


def train(side: Side, case: Clipped, *, plain: bool) -> dict[str, Any]:
    """Norms of all gradients before and after clipping, of some of them, and the parameters at the end."""
    clip: Any = torch.nn.utils.clip_grad_norm_ if plain or case.by == "torch" else dzero.clip_grad_norm_
    given: Any = side.optim if case.by == "optimizer" and not plain else [*side.params.values()]
    found: dict[str, Any] = {"norms": [], "clipped": [], "some": [], "error": ""}
    limit, p = MAX_NORMS[case.norm_type], case.norm_type
    some = [param for name, param in side.params.items() if case.poisoned in name]
    for step in range(STEPS):
        side.backward(step)
        is_poisoned = bool(case.poison) and step == STEPS - 1
        for grad in grads(some) if is_poisoned else ():
            grad.mul_(case.poison)
        found["some"].append(number(torch.nn.utils.get_total_norm(grads(some), p)))
        if is_poisoned:
            found["error"] = error_of(lambda: clip(given, limit, p, error_if_nonfinite=True))
        found["norms"].append(number(clip(given, limit, p)))
        if not is_poisoned:
            found["clipped"].append(number(torch.nn.utils.get_total_norm(grads(side.params.values()), p)))
            side.optim.step()
            side.optim.zero_grad()
    getattr(side.optim, "synchronize", lambda: None)()
    return found | {"params": {name: whole(param).clone() for name, param in side.params.items()}}


def error_of(attempt: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as told:
        attempt()
    return str(told.value)


def grads(params: Iterable[nn.Parameter]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


def number(norm: Tensor) -> float:
    return float(whole(norm))


def of_rank(rank: int, ranks: int, cases: list[Clipped]) -> list[dict[str, Any]]:
    return [train(in_dzero(rank, case), case, plain=False) for case in cases]


def check(pool: Pool, cases: list[Clipped]) -> None:
    """All of one number of ranks."""
    told = zip(*pool.run(of_rank, cases[0].run.ranks, cases, timeout_s=300), strict=True)
    for case, of_ranks in zip(cases, told, strict=True):
        right = train(in_torch(case), case, plain=True)
        for rank, found in enumerate(of_ranks):
            assert [*map(str, found["norms"])] == [*map(str, of_ranks[0]["norms"])], case  # the same bits everywhere
            for key in ("norms", "clipped", "some"):
                assert found[key] == pytest.approx(right[key], rel=2e-5, nan_ok=True), (key, case)
            assert ("non-finite" in found["error"]) == ("non-finite" in right["error"]) == bool(case.poison)
            for name, param in found["params"].items():
                want = right["params"][name]
                part = want if param.shape == want.shape else want.chunk(case.run.ranks)[rank]  # this rank's experts
                torch.testing.assert_close(param, part, rtol=1e-4, atol=2e-6, msg=f"{name} of {case}")


FIRST = [
    Clipped(mesh="dp2", norm_type=3.0, stage=3, by="optimizer"),
    Clipped(mesh="tp2", norm_type=math.inf, stage=1, poison=math.nan),
    Clipped(mesh="tp2", norm_type=2.0, stage=3, offload="host", by="dzero"),
    Clipped(mesh="pp2", norm_type=1.0, stage=1, poison=math.inf),
    Clipped(mesh="pp2", norm_type=2.0, stage=2, offload="host", by="dzero"),
    Clipped(mesh="ep2", norm_type=2.0, stage=3),
    Clipped(mesh="tied", norm_type=2.0, stage=1, by="optimizer"),
    Clipped(mesh="tied", norm_type=math.inf, stage=0, by="dzero"),
]


def test_gradients_are_clipped_by_the_norm_of_all_ranks(pool: Pool) -> None:
    """Steps of SGD, for which a wrong factor is a wrong step; weights at both ends of a pipeline count once."""
    check(pool, FIRST)


def test_a_gradient_that_is_not_finite_is_seen_by_ranks_without_it(pool: Pool) -> None:
    first = [(math.nan, 2.0), (math.inf, 2.0), (math.inf, math.inf)]
    check(pool, [Clipped(mesh="dp3", norm_type=each, poison=poison) for poison, each in first])


def norms_of(side: Side) -> list[float]:
    """Of each type of the first step's gradients, and that of copies of them."""
    side.backward(0)
    norms = []
    for p in MAX_NORMS:
        norms.append(number(torch.nn.utils.clip_grad_norm_(side.params.values(), 1e9, p)))
        norms.append(number(torch.nn.utils.get_total_norm([grad * 2.0 for grad in grads(side.params.values())], p)))
    return norms


def of_replicas(rank: int, ranks: int) -> list[list[float]]:
    """Of shards, and of states that the replicas divide among them, which is AdamW's alone."""
    every: list[tuple[str, ...]] = [("shard",), ("replicate", "shard")]
    return [
        norms_of(of_net(rank, ranks, dzero.AdamW, stage=2, replicate=2, optimizer_shard_axes=axes)) for axes in every
    ]


def test_replicas_count_once_also_in_copies_of_the_gradients(pool: Pool) -> None:
    model = small_decoders.build("uneven")
    params = dict(model.named_parameters())
    batches, _ = small_decoders.batches("uneven", steps=STEPS, ranks=4, microbatches=1)
    loss = torch.stack([small_decoders.loss_fn(model, batch) for (batch,) in batches]).mean()
    right = norms_of(Side(params, torch.optim.SGD(params.values()), lambda _: loss.backward()))  # type: ignore[no-untyped-call]
    for of_axes in pool.run(of_replicas, 4):
        for norms in of_axes:
            assert norms == pytest.approx(right, rel=1e-5)


@on_ranks(2)
def test_copies_of_gradients_of_a_cut_model_are_refused_and_early_names_clip_alike(rank: int, ranks: int) -> None:
    """A rank may have no copies; functions may have been imported before any model was sharded."""
    for mesh in ("tp2", "pp2"):
        side = in_dzero(rank, Clipped(mesh=mesh))
        side.backward(0)
        copies = [grad.float() * 1.0 for grad in grads(side.params.values())]
        with pytest.raises(RuntimeError, match=r"call dzero\.clip_grad_norm_\(parameters, max_norm\)"):
            torch.nn.utils.get_total_norm(copies)
        functions: list[Any] = [clip_grad_norm_, torch.nn.utils.clip_grad_norm_, dzero.clip_grad_norm_]
        assert len({number(clip(side.params.values(), 1e9)) for clip in functions}) == 1


def of_two_meshes(rank: int, ranks: int) -> list[float]:
    """One norm of a model that all ranks divide and of one of which each has a replica, which pytorch/pytorch#180346
    reports that torch does not compute; before and after clipping."""
    sides = [of_net(rank, ranks, stage=stage, seed=0) for stage in (3, 0)]
    for side in sides:
        side.backward(0)
    params = [param for side in sides for param in side.params.values()]
    return [number(torch.nn.utils.clip_grad_norm_(params, 0.1)) for _ in range(2)]


def test_one_norm_of_models_on_two_meshes(pool: Pool) -> None:
    side = in_torch(Clipped(mesh="dp2"))
    side.backward(0)
    alone = number(torch.nn.utils.get_total_norm(grads(side.params.values())))
    for norms in pool.run(of_two_meshes, 2):
        assert norms == pytest.approx([math.sqrt(2) * alone, 0.1], rel=2e-5)


class Parts(nn.Module):
    """Two parts, of which the last microbatch reaches one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, last: bool) -> Tensor:
        out: Tensor = self.first(x) if last else self.first(self.second(x))
        return out


def of_parts(rank: int, ranks: int) -> tuple[float, float, str]:
    """The norm of two parts, of which the last microbatch reaches one; that of the step; a refusal.

    The refusal is that of a norm of the `.grad` that are set after the backward.
    """
    units = dzero.ZeroConfig(stage=2, units=lambda each: isinstance(each, nn.Linear))
    sharded = dzero.shard(Parts(), units, microbatches=2, precision="fp32")
    optim = dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=LR, max_norm=1e9)

    def backward() -> None:
        for index in range(2):
            with sharded.microbatch(is_last=index == 1):
                sharded.model(torch.ones(2, 3) + rank, last=index == 1).sum().backward()
            if index == 0:
                assert number(torch.nn.utils.clip_grad_norm_(sharded.model.parameters(), 1e-3)) == 0

    backward()
    error = error_of(lambda: torch.nn.utils.get_total_norm(grads(sharded.named_params().values())))
    optim.zero_grad()
    backward()
    norm = number(torch.nn.utils.clip_grad_norm_(sharded.model.parameters(), 1e9))
    optim.step()
    assert optim.last_decision is not None
    return norm, optim.last_decision.norm, error


def test_gradients_of_earlier_microbatches_count(pool: Pool) -> None:
    """A part of the model that the last microbatch does not reach has its gradients in the norm, or all ranks raise."""
    for norm, step, error in pool.run(of_parts, 2):
        assert norm == pytest.approx(step, rel=1e-6)
        assert "the last microbatch did not reach" in error
