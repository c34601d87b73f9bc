"""A staged group of four CPU ranks gives what gloo gives, and trains to the bits of the oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
import staged_cases
import torch
from four_rank_cases import RANKS, Run, oracle, train
from pool import Pool


def test_every_collective_gives_what_gloo_gives(pool: Pool) -> None:
    assert pool.run(staged_cases.compare, RANKS) == [[]] * RANKS


FULL = pytest.mark.full("tests/gpu/test_staged_group.py::test_training_has_the_bits_of_the_oracle")
MORE = (Run(0), Run(1, reduction="native"), Run(2, 2, tier="host"))


@pytest.mark.parametrize("run", [Run(3, precision="bf16"), *(pytest.param(run, marks=FULL) for run in MORE)], ids=str)
def test_training_has_the_bits_of_the_oracle(pool: Pool, tmp_path: Path, run: Run) -> None:
    """What test_four_ranks.py runs on a GPU."""
    want = oracle(run)
    for masters, norms in pool.run(train, RANKS, str(tmp_path / "rendezvous"), "cpu", run):
        assert norms == want.norms
        assert [name for name in want.masters if not torch.equal(masters[name], want.masters[name])] == []


@FULL
def test_hybrid_sharding_follows_the_oracle(pool: Pool, tmp_path: Path) -> None:
    """Two hops in fp32 round otherwise than one: 1e-7 of a gradient, which AdamW may turn into a part of a step."""
    run = Run(3, 2, replicate=2)
    want = oracle(run)
    for masters, norms in pool.run(train, RANKS, str(tmp_path / "rendezvous"), "cpu", run):
        assert norms == pytest.approx(want.norms, rel=1e-5)
        for name, master in want.masters.items():
            torch.testing.assert_close(masters[name], master, rtol=0, atol=1e-4)
