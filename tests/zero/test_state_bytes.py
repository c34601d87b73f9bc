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

CELLS: list[dict[str, Any]] = [
    *({"stage": stage, "param": "bf16", "master": "remainder"} for stage in (0, 2)),
    *({"stage": stage, "microbatches": 4, "param": "bf16"} for stage in (1, 2, 3)),
    {"stage": 3, "param": "bf16", "moments": "int8"},
    {"stage": 1, "param": "fp16", "grad": "fp32"},
]


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_bytes_of_states_in_a_step_and_between_steps_are_the_formulas(cell: dict[str, Any]) -> None:
    """Of a net that ranks cut evenly; of others: tests/test_recorded.py."""
    microbatches, stage = cell.get("microbatches", 1), cell["stage"]
    with fake_ranks(2, rank=1):
        sharded = sharded_net("even", **cell)
        optim = AdamW(sharded)
        rest, peak = testing.resting_bytes(sharded), testing.peak_bytes(sharded)
        first, second = small_decoders.batches("even", steps=2, ranks=1, microbatches=microbatches, samples=1, tokens=4)
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
        assert live_bytes() == before
        assert optim.state_bytes() == {kind: rest[kind] for kind in ("param", "master", "moments")}
    if microbatches > 1:  # whole gradients wait at stage 1, and whole parameters stay at stages 1 and 2
        assert between == peak["param"] - rest["param"] + peak["grad"]
        assert (peak["param"] > rest["param"]) == (stage in (1, 2))
    assert grad == peak["grad"] // (2 if stage == 1 and microbatches > 1 else 1)


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
