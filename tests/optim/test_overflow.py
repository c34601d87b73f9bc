"""A non-finite gradient on one rank: every rank skips, nothing changes, it is counted, and the culprit is named.

In fp16 the scale of the loss moves as configured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from many_cells import of_all, of_cells
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn import functional
from training_loops import backward, sharded_net, snapshot, unequal

import dzero

POISON = {"inf": math.inf, "nan": math.nan}


@contextmanager
def poisoned(sharded: dzero.Sharded, kind: str) -> Iterator[None]:
    """Once, one element of the gradient of the embedding's output is spoilt."""
    armed = [True]

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = POISON[kind]
        return grad

    def watch(module: nn.Module, args: object, output: Tensor) -> None:
        if armed:
            output.register_hook(spoil)
            armed.clear()

    handle = sharded.model.get_submodule("embed").register_forward_hook(watch)
    yield
    handle.remove()


def skip(rank: int, ranks: int, stage: int, microbatches: int, kind: str, precision: dict[str, Any]) -> dict[str, Any]:
    """One good step, a bad one (rank 1's first microbatch), another bad one, and a good one again."""
    sharded = sharded_net("even", stage=stage, microbatches=microbatches, **precision)
    optim = dzero.AdamW(sharded, max_norm=1.0, scaler=dzero.ScalerConfig(init=1024.0))
    drawn = small_decoders.batches("even", steps=4, ranks=ranks, microbatches=microbatches)
    backward(sharded, optim, drawn[0][rank])
    optim.step()
    before, scale, skipped = snapshot(sharded, optim), optim.scaler.scale, []
    for step in (1, 2):
        with poisoned(sharded, kind) if rank == 1 else nullcontext():
            backward(sharded, optim, drawn[step][rank])
        optim.step()
        skipped.append((optim.skipped_steps, optim.consecutive_skips, optim.last_decision.nonfinite_params))
        row = int(drawn[step][1][0][0, 0])  # the poisoned output belongs to this token: a rank sums so many of 64
        shard, copy = divmod(row // (64 // ranks), ranks // 2) if "replicate" in precision else (row // 32, 0)
        assert optim.last_decision.nonfinite_params == (f"embed.weight (rank {copy * 2 + shard})",)
        assert not optim.last_decision.finite
        assert unequal(snapshot(sharded, optim), before) == []
        assert optim.gradients.named() == {}
    scales = scale, optim.scaler.scale
    backward(sharded, optim, drawn[3][rank])
    optim.step()
    after = snapshot(sharded, optim)
    assert optim.last_decision.finite
    assert all(torch.isfinite(t.float()).all() for t in after.values())
    assert unequal(after, before) != []
    counts = optim.skipped_steps, optim.consecutive_skips
    return {"skipped": skipped, "scales": scales, "counts": counts, "norm": optim.last_decision.norm}


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("inf", {"param": "bf16", "master": "remainder"}),
    ("inf", {"param": "fp16"}),
    ("nan", {"param": "bf16", "moments": "bf16"}),
    ("nan", {"param": "fp32"}),
    ("inf", {"param": "bf16", "moments": "int8"}),
]
SOME = [(0, 1, *KINDS[1]), (2, 2, *KINDS[2]), (3, 2, *KINDS[0])]
EVERY = [(stage, microbatches, *kind) for stage in range(4) for microbatches in (1, 2) for kind in KINDS]


def check(pool: Pool, cells: list[tuple[int, int, str, dict[str, Any]]]) -> None:
    """Every rank skips, counts and goes on; the workers have checked that nothing changed to the bit.

    The culprit is the parameter and the one rank that holds the bad row, so the other rank's own gradients were finite.
    Only the loss scale of fp16 moves.
    """
    for (*_, precision), (first, second) in zip(cells, of_cells(pool, 2, skip, cells), strict=True):
        assert first["skipped"] == second["skipped"]
        assert [(total, row) for total, row, _ in first["skipped"]] == [(1, 1), (2, 2)]
        assert {named for *_, named in first["skipped"]} <= {(f"embed.weight (rank {rank})",) for rank in range(2)}
        assert first["counts"] == (2, 0)
        assert first["norm"] == second["norm"] > 0
        assert first["scales"] == ((1024.0, 256.0) if precision["param"] == "fp16" else (1.0, 1.0))


def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_by_all(pool: Pool) -> None:
    check(pool, SOME)


@pytest.mark.full("tests/optim/test_overflow.py::test_a_step_with_a_gradient_that_is_not_finite_is_skipped_by_all")
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped_by_all_full_product(pool: Pool) -> None:
    check(pool, EVERY)


@pytest.mark.full("tests/optim/test_overflow.py::test_a_step_with_a_gradient_that_is_not_finite_is_skipped_by_all")
def test_hybrid_copies_skip_together(pool: Pool) -> None:
    runs = pool.run(skip, 4, 3, 2, "inf", {"param": "bf16", "replicate": 2})
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


def whole_on_each(rank: int, _: int) -> tuple[Any, ...]:
    """Rank 1 alone spoils, in its second step, the gradient of a parameter that both ranks of tp have."""
    torch.manual_seed(0)
    model, mesh = Cut(), dzero.make_mesh("cpu", tp=2)
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    cut = dzero.parallelize(model, mesh, dzero.ParallelConfig(tensor_plan=plan, replicated=["embed.*"]))
    sharded = dzero.shard(cut, dzero.ZeroConfig(stage=2), precision=dzero.PrecisionConfig(param="fp32"))
    optim, told = dzero.AdamW(sharded, max_norm=1.0), []
    tokens = torch.arange(12).view(2, 6)
    for step in range(3):
        before = snapshot(sharded, optim)
        with poisoned(sharded, "inf") if (step, rank) == (1, 1) else nullcontext(), sharded.microbatch():
            functional.cross_entropy(sharded.model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optim.step()
        decision = optim.last_decision
        kept = unequal(snapshot(sharded, optim), before) == []
        told.append((decision.finite, math.isfinite(decision.norm), decision.nonfinite_params, kept))
    return *told, optim.skipped_steps


def test_a_copy_of_one_rank_of_a_cut_model_stops_all_of_them(pool: Pool) -> None:
    good = (True, True, (), False)
    for told, who in zip(pool.run(whole_on_each, 2), ("tp rank 1", "rank 1"), strict=True):
        assert told == (good, (False, False, (f"embed.weight ({who})",), True), good, 1)


def scaled(config: dict[str, Any], param: str = "fp16") -> tuple[dzero.Sharded, dzero.AdamW]:
    torch.manual_seed(0)
    sharded = dzero.shard(nn.Linear(2, 1), dzero.ZeroConfig(stage=1), precision=dzero.PrecisionConfig(param=param))
    return sharded, dzero.AdamW(sharded, scaler=dzero.ScalerConfig(**{"init": 8.0, **config}))


def after_each(sharded: dzero.Sharded, optim: dzero.AdamW, outcomes: str) -> list[float]:
    """The scale after each step; g: a good one, b: a bad one."""
    seen = []
    for outcome in outcomes:
        loss = sharded.model(torch.ones(1, 2)).float().sum() * (1.0 if outcome == "g" else math.inf)
        optim.scale_loss(loss).backward()
        optim.step()
        seen.append(optim.grad_scale)
    return seen


def scales(rank: int, ranks: int, config: dict[str, Any], outcomes: str, param: str) -> list[float]:
    return after_each(*scaled(config, param), outcomes)


SCALES: list[tuple[dict[str, Any], str, str, list[float]]] = [
    ({"growth_interval": 2}, "gggg", "fp16", [8, 16, 16, 32]),  # doubles after good steps in a row
    ({"growth_interval": 2}, "gbgg", "fp16", [8, 4, 4, 8]),  # halves at a bad one
    ({"floor": 2.0}, "bbbb", "fp16", [4, 2, 2, 2]),
    ({"hysteresis": 2}, "bgbgbb", "fp16", [8, 8, 8, 8, 8, 4]),  # forgives bad steps until they come in a row
    ({"hysteresis": 2}, "bbb", "fp16", [8, 4, 2]),
    ({"growth_interval": 1}, "gbg", "bf16", [1, 1, 1]),
]


def test_the_scale_of_fp16_moves_as_configured(pool: Pool) -> None:
    for (*_, want), (found,) in zip(SCALES, of_cells(pool, 1, scales, [each[:3] for each in SCALES]), strict=True):
        assert found == want


def resumed(
    rank: int, ranks: int, folder: Path, number: int, saved: tuple[dict[str, Any], str, str], loaded: tuple[Any, ...]
) -> list[float]:
    """The scales of a run that resumes from what another one of (config, dtype, outcomes) has saved."""
    path = str(folder / str(number))
    for config, param, outcomes in (saved, loaded):
        sharded, optim = scaled(config, param)
        with dzero.Checkpointer(dzero.CheckpointConfig(folder=path), sharded, optim) as checkpoints:
            checkpoints.resume("auto")
            found = after_each(sharded, optim, outcomes)
            checkpoints.save(len(outcomes) + 10 * (outcomes == loaded[2]), {})
    return found


def test_a_resumed_scale_goes_on_where_the_saved_one_was_between_runs_that_scale(pool: Pool, tmp_path: Path) -> None:
    careful, eager = {"growth_interval": 3, "hysteresis": 2}, {"growth_interval": 2}
    cells = [
        ((careful, "fp16", "ggbgg"), (careful, "fp16", "gbb")),  # grown once to 16, halved once
        (({"growth_interval": 9}, "fp16", "ggggg"), (eager, "fp16", "g")),  # an interval that became shorter
        (({}, "bf16", "g"), (eager, "fp16", "b")),
        (({}, "fp16", "b"), ({}, "bf16", "g")),
    ]
    found = of_all(pool, 1, resumed, [(tmp_path, number, *each) for number, each in enumerate(cells)])
    assert found == [[16.0, 16.0, 8.0], [16.0], [4.0], [1.0]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": 1.0, "floor": 2.0}, r"scaler\.floor=2\.0.*scaler\.init=1\.0.*0 < floor ≤ init"),
        ({"growth_interval": 0}, r"scaler\.growth_interval=0.*≥ 1"),
        ({"hysteresis": 0}, r"scaler\.hysteresis=0.*≥ 1"),
    ],
)
def test_scaler_settings_that_cannot_work_are_errors(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dzero.ScalerConfig(**settings)
