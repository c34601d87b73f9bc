"""A non-finite gradient on one rank: every rank skips, nothing changes, it is counted, and the culprit is named."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import small_decoders
import torch
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional
from training_loops import backward, sharded_net, snapshot, unequal

from dzero import AdamW, ParallelConfig, PrecisionConfig, ScalerConfig, ZeroConfig, make_mesh, parallelize, shard

POISON = {"inf": math.inf, "nan": math.nan}


class Poison:
    """A forward hook that, once, spoils one element of the gradient of a module's output."""

    def __init__(self, value: float) -> None:
        self.value, self.armed = value, True

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> None:
        if self.armed:
            output.register_hook(self._spoil)  # type: ignore[no-untyped-call]
            self.armed = False

    def _spoil(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = self.value
        return grad


def skip(rank: int, ranks: int, stage: int, microbatches: int, kind: str, precision: dict[str, Any]) -> dict[str, Any]:
    """One good step, a bad one (rank 1's first microbatch), another bad one, and a good one again."""
    sharded = sharded_net("even", stage=stage, microbatches=microbatches, **precision)
    optim = AdamW(sharded, max_norm=1.0, scaler=ScalerConfig(init=1024.0))
    drawn = small_decoders.batches("even", steps=4, ranks=ranks, microbatches=microbatches)
    backward(sharded, optim, drawn[0][rank])
    optim.step()
    before, scale, skipped = snapshot(sharded, optim), optim.scaler.scale, []
    for step in (1, 2):
        if rank == 1:  # its first microbatch spoils one row of one gradient
            handle = sharded.model.get_submodule("embed").register_forward_hook(Poison(POISON[kind]))
        backward(sharded, optim, drawn[step][rank])
        if rank == 1:
            handle.remove()
        optim.step()
        assert optim.last_decision is not None
        skipped.append((optim.skipped_steps, optim.consecutive_skips, optim.last_decision.nonfinite_params))
        row = int(drawn[step][1][0][0, 0])  # the poisoned output belongs to this token: a rank sums so many of 64
        shard, copy = divmod(row // (64 // ranks), ranks // 2) if "replicate" in precision else (row // 32, 0)
        assert optim.last_decision.nonfinite_params == (f"embed.weight (rank {copy * 2 + shard})",)
        assert not optim.last_decision.finite
        assert unequal(snapshot(sharded, optim), before) == []
        assert optim.gradients.named() == {}
    after_scale = optim.scaler.scale
    backward(sharded, optim, drawn[3][rank])
    optim.step()
    changed = unequal(snapshot(sharded, optim), before)
    assert optim.last_decision is not None
    assert optim.last_decision.finite
    assert all(torch.isfinite(t.float()).all() for t in snapshot(sharded, optim).values())
    return {
        "skipped": skipped,
        "scales": (scale, after_scale),
        "counts": (optim.skipped_steps, optim.consecutive_skips),
        "changed": len(changed),
        "norm": optim.last_decision.norm,
    }


CELLS = [
    (stage, microbatches, kind, precision)
    for (stage, microbatches), (kind, precision) in zip(
        itertools.product((0, 1, 2, 3), (1, 2)),
        itertools.cycle(
            [
                ("inf", {"param": "bf16", "master": "remainder"}),
                ("nan", {"param": "fp32"}),
                ("inf", {"param": "fp16"}),
                ("nan", {"param": "bf16", "moments": "bf16"}),
                ("inf", {"param": "bf16", "moments": "int8"}),
            ]
        ),
        strict=False,
    )
]


def skip_all(rank: int, ranks: int) -> list[dict[str, Any]]:
    return [skip(rank, ranks, *cell) for cell in CELLS]


@pytest.fixture(scope="module")
def runs(pool: Pool) -> list[list[dict[str, Any]]]:
    """Results by rank and cell; the workers have checked that nothing changed to the bit."""
    return pool.run(skip_all, 2)


def test_every_rank_skips_counts_and_goes_on(runs: list[list[dict[str, Any]]]) -> None:
    for of_rank0, of_rank1 in zip(*runs, strict=True):
        assert of_rank0["skipped"] == of_rank1["skipped"]
        assert [(total, row) for total, row, _ in of_rank0["skipped"]] == [(1, 1), (2, 2)]
        assert of_rank0["counts"] == (2, 0)
        assert of_rank0["changed"] > 0
        assert of_rank0["norm"] == of_rank1["norm"] > 0


def test_culprits_are_the_parameter_and_the_one_rank_that_holds_the_bad_row(runs: list[list[dict[str, Any]]]) -> None:
    """So the other rank's own gradients were finite, and it skipped all the same."""
    named = {nonfinite_params for row in runs[0] for _, _, nonfinite_params in row["skipped"]}
    assert named <= {("embed.weight (rank 0)",), ("embed.weight (rank 1)",)}


def test_only_the_loss_scale_of_fp16_moves(runs: list[list[dict[str, Any]]]) -> None:
    for (_, _, _, precision), row in zip(CELLS, runs[0], strict=True):
        assert row["scales"] == ((1024.0, 256.0) if precision["param"] == "fp16" else (1.0, 1.0))


def skip_hybrid(rank: int, ranks: int) -> dict[str, Any]:
    return skip(rank, ranks, 3, 2, "inf", {"param": "bf16", "replicate": 2})


def test_hybrid_copies_skip_together(pool: Pool) -> None:
    runs = pool.run(skip_hybrid, 4)
    assert all(run["counts"] == (2, 0) for run in runs)
    assert all(run["skipped"] == runs[0]["skipped"] for run in runs)


class Cut(nn.Module):
    """What is before and after two matrices that tp cuts is whole on each of its ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(16, 8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        return functional.linear(x, self.embed.weight)


def whole_on_each(rank: int, _: int, kind: str) -> tuple[Any, ...]:
    """Rank 1 alone spoils, in its second step, the gradient of a parameter that both ranks of tp have."""
    torch.manual_seed(0)
    model, mesh = Cut(), make_mesh("cpu", tp=2)
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    cut = parallelize(model, mesh, ParallelConfig(tensor_plan=plan, replicated=["embed.*"]))
    sharded = shard(cut, ZeroConfig(stage=2), precision=PrecisionConfig(param="fp32"))
    optim, told = AdamW(sharded, max_norm=1.0), []
    tokens = torch.arange(12).view(2, 6)
    for step in range(3):
        before = snapshot(sharded, optim)
        if step == 1 and rank == 1:
            handle = sharded.model.get_submodule("embed").register_forward_hook(Poison(POISON[kind]))
        with sharded.microbatch():
            functional.cross_entropy(sharded.model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
        if step == 1 and rank == 1:
            handle.remove()
        optim.step()
        decision = optim.last_decision
        assert decision is not None
        kept = unequal(snapshot(sharded, optim), before) == []
        told.append((decision.finite, math.isfinite(decision.norm), decision.nonfinite_params, kept))
    return *told, optim.skipped_steps


@pytest.mark.parametrize("kind", POISON)
def test_a_copy_of_one_rank_of_a_cut_model_stops_all_of_them(pool: Pool, kind: str) -> None:
    good = (True, True, (), False)
    for told, who in zip(pool.run(whole_on_each, 2, kind), ("tp rank 1", "rank 1"), strict=True):
        assert told == (good, (False, False, (f"embed.weight ({who})",), True), good, 1)
