"""Experts that data-parallel neighbours share, beside every stage: the same training as in one process, whatever tokens
choose, and states that move."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_cases import (
    SHAPE,
    Run,
    afresh,
    biases_after_a_skip,
    by_own_module,
    loaded,
    oracle,
    saved,
    trained,
    without_their_handle,
)
from pool import Pool
from torch import nn

from dzero import make_mesh
from dzero.comm.ledger import Entry
from dzero.estimate.fake_group import fake_group
from dzero.mesh import expert_degrees
from dzero.models.moe import MoE
from dzero.parallel.expert.dispatch import expected_experts, parallelize_experts

FP32 = 1e-5
"""Relative: of losses and norms of every step, and of the length of each parameter after 20. Sums are cut elsewhere."""

RUNS = [
    Run(dp=4, ep=2, stage=0),
    Run(dp=4, ep=2, stage=3, microbatches=2, offload="host"),
    Run(dp=4, ep=4, stage=2, forced=True, top_k=1),
    Run(dp=2, ep=2, stage=1, microbatches=2, tied=True),
]
MORE = [
    *(Run(dp=4, ep=ep, stage=stage, microbatches=m) for ep in (2, 4) for stage in range(4) for m in (1, 2)),
    *(Run(dp=4, ep=2, stage=stage, microbatches=2, offload="host") for stage in range(4)),
    *(Run(dp=2, ep=2, stage=stage, offload="disk") for stage in (1, 2)),
    *(Run(dp=2, ep=2, stage=stage, recompute="full", tied=True, microbatches=2) for stage in range(4)),
    *(Run(dp=4, ep=2, stage=stage, replicate=2, microbatches=m) for stage in (1, 2, 3) for m in (1, 2)),
    *(Run(dp=4, ep=ep, stage=stage, forced=True, top_k=1) for ep in (2, 4) for stage in (0, 1, 3)),
    *(Run(dp=4, ep=4, stage=stage, forced=True, microbatches=2) for stage in (0, 2)),
    *(Run(dp=dp, ep=2, stage=3, cp=2) for dp in (2, 4)),
    *(Run(dp=2, ep=2, stage=stage, balance="loss", recompute=r) for stage in (1, 3) for r in ("none", "full")),
    Run(dp=4, ep=2, stage=3, balance="none", experts=6),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    "run", [*RUNS, *(pytest.param(run, marks=pytest.mark.slow) for run in MORE if run not in RUNS)], ids=str
)
def test_every_stage_trains_as_in_one_process(pool: Pool, run: Run) -> None:
    told = pool.run(trained, run.ranks, run, timeout_s=300)
    want, biases = oracle(run)
    for step, expected in enumerate(want.losses):
        losses = [of_rank["losses"][step] for of_rank in told]
        assert sum(losses) / len(losses) == pytest.approx(expected, rel=FP32)
        assert {of_rank["norms"][step] for of_rank in told} == {told[0]["norms"][step]}
        assert told[0]["norms"][step] == pytest.approx(want.norms[step], rel=FP32)
    params = told[0]["params"]
    assert params.keys() == want.params.keys()
    for name, value in want.params.items():
        apart = (params[name] - value).norm() / value.norm()
        assert apart < FP32, f"{name}: {apart:.1e}"
    for of_rank in told:
        check_biases(of_rank["biases"], biases, run)
        check_traffic(of_rank, run)


def check_biases(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], run: Run) -> None:
    """They are equal, and have moved."""
    assert found.keys() == (wanted.keys() if run.balance == "auxiliary-loss-free" else set())
    for name, bias in found.items():
        assert torch.equal(bias, wanted[name]), name
        assert bias.any()


def check_traffic(told: dict[str, Any], run: Run) -> None:
    """Of the last step: the table's as without experts, theirs as counted rows and the formula say."""
    rows, calls, recomputed = told["rows"], SHAPE.layers * run.microbatches, run.recompute != "none"
    due = told["theory"] | expected_experts(
        ranks=run.ep,
        experts=run.experts,
        calls=calls,
        rows_moved=rows // (2 if recomputed else 1),
        row_elems=SHAPE.hidden_size,
        dtype=torch.float32,
        recomputed=recomputed,
    )
    counted = {entry: each for entry, each in told["moved"].items() if entry.phase not in ("control", "context")}
    assert counted == {entry: each for entry, each in due.items() if entry.phase not in ("control", "context")}
    moved = counted[Entry("experts", "all_to_all", "ep", "float32")]
    assert moved.calls == calls * (6 if recomputed else 4)  # there and back: forward, again, and backward
    if run.forced and run.top_k == 1 and run.ep == run.dp == 4:
        tokens = 2 * 12 * calls  # of a rank; all are the last one's, which gets those of three others
        assert rows in (tokens, 3 * tokens)
        assert moved.sent_bytes == 2 * rows * 32 * 4


MESHES = [
    Run(dp=4, ep=2, stage=3, precision="bf16"),
    Run(dp=4, ep=1, stage=2, precision="bf16"),
    Run(dp=4, ep=4, stage=1, precision="bf16"),
    Run(dp=4, ep=2, stage=0, precision="bf16"),
    Run(dp=4, ep=2, stage=2, replicate=2, precision="bf16"),
    Run(dp=1, ep=1, stage=0, precision="bf16"),
]


MOVES = [
    (MESHES[0], MESHES),
    (MESHES[3], MESHES[2:3]),
    *(pytest.param(run, MESHES, marks=pytest.mark.slow) for run in MESHES[1:]),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("source", "targets"), MOVES, ids=str)
def test_a_checkpoint_moves_between_meshes_exactly(pool: Pool, tmp_path: Path, source: Run, targets: list[Run]) -> None:
    held = pool.run(saved, source.ranks, source, tmp_path, timeout_s=300)
    assert all(torch.equal(value, of_rank[name]) for of_rank in held for name, value in held[0].items())
    for target in targets:
        got = pool.run(loaded, target.ranks, target, tmp_path, timeout_s=300)
        for of_rank in got:
            assert of_rank.keys() == held[0].keys()
            assert [key for key in held[0] if not torch.equal(held[0][key], of_rank[key])] == [], target


def test_every_rank_draws_the_values_of_one_process(pool: Pool) -> None:
    run = Run(dp=4, ep=2, stage=3, precision="bf16")
    alone = pool.run(afresh, 1, Run(dp=1, ep=1, stage=0, precision="bf16"))[0]
    for of_rank in pool.run(afresh, 4, run):
        assert [name for name, value in alone.items() if not torch.equal(value, of_rank[name])] == []


@pytest.mark.parametrize("used", [4, 1])
def test_a_module_of_ones_own_finds_the_gradients_of_one_process_with_the_first_ranks_values(
    pool: Pool, used: int
) -> None:
    """With one expert in use, every other rank has none to do, and its module does nothing."""
    for apart in pool.run(by_own_module, 4, used):
        assert apart < 1e-6


def test_a_skipped_step_moves_no_bias(pool: Pool) -> None:
    for before, skipped, after in pool.run(biases_after_a_skip, 2):
        assert torch.equal(before, skipped)
        assert not torch.equal(skipped, after)
        assert after.abs().max() == pytest.approx(0.01)  # once, by what was counted after it


def test_experts_need_their_handle(pool: Pool) -> None:
    for told in pool.run(without_their_handle, 2):
        assert "2 ranks share experts of unit root: pass what parallelize_experts returned as experts=" in told


def test_what_ep_does_not_divide_is_named() -> None:
    assert [expert_degrees(1, 8, 2), expert_degrees(8, 1, 4), expert_degrees(2, 4, 4)] == [(1, 4), (2, 1), (2, 1)]
    assert [expert_degrees(1, 8, 8, 4), expert_degrees(8, 1, 4, 4), expert_degrees(2, 4, 4, 2)] == [
        (1, 4),
        (8, 1),
        (2, 2),
    ]
    with pytest.raises(ValueError, match=r"mesh.ep=4 does not divide the 2 .* of axis shard, .* allowed: \[1, 2\]"):
        expert_degrees(2, 2, 4)
    with fake_group(2), torch.device("meta"):
        mesh = make_mesh("cpu")
        with pytest.raises(ValueError, match=r"mesh.ep=2 does not divide dim 0 of parameter layers.0.ffn.experts.gate"):
            parallelize_experts(MoE(replace(SHAPE, experts=3, ffn_size=5)), mesh, 2)
        with pytest.raises(ValueError, match=r"mesh.ep=2: Linear has no module of experts; take mesh.ep=1"):
            parallelize_experts(nn.Linear(2, 2), mesh, 2)
        tied = MoE(SHAPE)
        tied.layers[1].ffn.experts.gate = tied.layers[0].ffn.experts.gate  # type: ignore[union-attr, assignment]
        with pytest.raises(ValueError, match=r"layers.0.ffn.experts.gate of experts is used elsewhere too"):
            parallelize_experts(tied, mesh, 2)
    with fake_group(4), pytest.raises(ValueError, match=r"ranks of axis shard x mesh.tp=2, .* allowed: \[2, 4\]"):
        parallelize_experts(MoE(SHAPE), make_mesh("cpu", tp=2), 1)
