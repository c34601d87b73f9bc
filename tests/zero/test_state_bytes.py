"""Bytes per rank: what the optimizer really holds against the formulas of the table, and the paper's beside them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import small_decoders
from fake_ranks import fake_ranks
from live_tensors import live_bytes
from papers.arithmetic import zero_bytes
from papers.assumptions import read_papers
from training_loops import backward, sharded_net

from dzero import AdamW, testing

REMAINDER = {"param": "bf16", "master": "remainder"}
CELLS: list[dict[str, Any]] = [
    *({"stage": stage, **REMAINDER} for stage in (0, 2)),
    *({"stage": stage, "microbatches": 4, "param": "bf16"} for stage in (1, 2, 3)),
    {"stage": 3, "param": "bf16", "moments": "int8"},
    {"stage": 1, "param": "fp16", "grad": "fp32"},
    {"net": "uneven", "stage": 2, **REMAINDER},
    {"net": "uneven", "stage": 3, **REMAINDER, "moments": "bf16"},
]


def of_cell(net: str = "even", *, microbatches: int = 1, **kwargs: Any) -> dict[str, Any]:
    """Bytes of this rank between steps and in the second one, and what the formulas say of both."""
    sharded = sharded_net(net, microbatches=microbatches, **kwargs)
    optim = AdamW(sharded)
    first, second = small_decoders.batches(net, steps=2, ranks=1, microbatches=microbatches, samples=1, tokens=4)
    backward(sharded, optim, first[0])
    optim.step()
    optim.zero_grad()
    gc.collect()
    before = live_bytes()
    for batch in second[0][:-1]:
        with sharded.microbatch(is_last=False):
            small_decoders.loss_fn(sharded.model, batch).backward()  # type: ignore[no-untyped-call]
    between = live_bytes() - before
    backward(sharded, optim, second[0][-1:])
    grad = testing.local_bytes(param.grad for param in sharded.named_params().values() if param.grad is not None)
    optim.step()
    optim.zero_grad()
    return {
        "cell": str((net, microbatches, kwargs)),
        "stage": sharded.layout.stage,
        "rest": optim.state_bytes(),
        "grad": grad,
        "between": between,
        "left": live_bytes() - before,
        "formula": testing.resting_bytes(sharded),
        "peak": testing.peak_bytes(sharded),
    }


def check(row: dict[str, Any]) -> None:
    rest, formula, peak, where = row["rest"], row["formula"], row["peak"], row["cell"]
    if "uneven" in where:  # padding only: the largest rank holds what the formula says, others at most that
        assert all(rest[kind] <= formula[kind] for kind in rest), where
        assert rest["param"] == formula["param"], "FSDP2 pads its own shards"
        return
    assert rest == {kind: formula[kind] for kind in ("param", "master", "moments")}, where
    assert row["left"] == 0, where
    if row["between"]:  # whole gradients wait at stage 1, and whole parameters stay at stages 1 and 2
        assert row["between"] == peak["param"] - formula["param"] + peak["grad"], where
        assert (peak["param"] > formula["param"]) == (row["stage"] in (1, 2)), where
        assert row["grad"] == peak["grad"] // (2 if row["stage"] == 1 else 1), where
    else:
        assert row["grad"] == peak["grad"], where


def test_bytes_of_states_in_a_step_and_between_steps_are_the_formulas() -> None:
    with fake_ranks(2, rank=1):
        for cell in CELLS:
            check(of_cell(**cell))


@pytest.mark.parametrize("ranks", [2, 64])
def test_the_papers_formulas_stand_beside_ours(ranks: int) -> None:
    """bf16, fp32 masters and moments, M = 1; per parameter: the paper's 16, 2 + 2 + 12/N, 2 + 14/N, 16/N."""
    paper = {0: 16.0, 1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}
    # FSDP2 keeps its registered shard beside a whole copy (2/N more); its gradients are sharded at stage 1 when M = 1.
    ours = {0: 16.0, 1: 2 + 16 / ranks, 2: 2 + 16 / ranks, 3: 16 / ranks}
    for stage in (0, 1, 2, 3):
        with fake_ranks(ranks):
            sharded = sharded_net("even", stage=stage)
            elems = sum(param.numel() for param in sharded.named_params().values())
            told, peak = sum(testing.paper_bytes(sharded).values()), sum(testing.peak_bytes(sharded).values())
        assert told == pytest.approx(paper[stage] * elems, abs=4)
        assert told == pytest.approx(zero_bytes(read_papers().zero, elems, stage, ranks), abs=4)
        if ranks == 2:  # which every row of every parameter divides
            assert peak == ours[stage] * elems
