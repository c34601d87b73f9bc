"""States of a cut model move between any two meshes, to the bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import cut_runs
import pytest
import torch
from cut_runs import Run
from parity_cells import together
from pool import Pool
from safetensors.torch import load_file

import dzero

BF16 = {"param": "bf16"}
TIED: dict[str, Any] = {"precision": BF16, "layers": 4, "tied": True}
DENSE = [
    Run(stage=3, tp=2, **TIED),
    Run(stage=1, pp=2, parts=2, schedule="interleaved", microbatches=2, **TIED),
    Run(stage=3, dp=2, tp=2, **TIED),
    Run(stage=1, pp=2, dp=2, parts=2, schedule="interleaved", microbatches=2, **TIED),
    Run(stage=0, **TIED),
    Run(stage=2, pp=2, tp=2, microbatches=2, **TIED),
    Run(stage=3, dp=4, replicate=2, **TIED),
]
REMAINDER = {"param": "bf16", "master": "remainder"}
MATRICES = [
    Run(stage=1, tp=4, precision=REMAINDER),
    Run(stage=2, dp=4, precision=REMAINDER),
    Run(stage=3, dp=2, tp=2, precision=REMAINDER),
]
MIXED = {"experts": 4, "precision": BF16}
MIXTURES = [
    Run(stage=3, dp=4, ep=2, **MIXED),
    Run(stage=1, dp=1, ep=2, tp=2, pp=2, microbatches=2, **MIXED),
    Run(stage=0, **MIXED),
    Run(stage=2, dp=4, ep=2, replicate=2, **MIXED),
    Run(stage=0, dp=2, ep=2, pp=2, microbatches=2, **MIXED),
    Run(stage=2, dp=4, **MIXED),
]
MOVES = [(MIXTURES[0], MIXTURES[2]), (DENSE[0], DENSE[1])]
FIRST = "tests/parallel/test_cut_checkpoints.py::test_a_checkpoint_moves_between_meshes_exactly"
MORE = [
    pytest.param(*each, marks=pytest.mark.full(FIRST))
    for runs in (DENSE, MATRICES, MIXTURES)
    for each in pairwise([*runs, runs[0]])
    if each not in MOVES
]


@pytest.mark.parametrize(("source", "target"), [*MOVES, *MORE], ids=str)
def test_a_checkpoint_moves_between_meshes_exactly(pool: Pool, tmp_path: Path, source: Run, target: Run) -> None:
    held = together(pool.run(cut_runs.saved, source.ranks, source, tmp_path, timeout_s=300))
    assert len([name for name in held if name.startswith("bias ")]) == (2 if source.experts else 0)
    got = together(pool.run(cut_runs.loaded, target.ranks, target, tmp_path, timeout_s=300))
    assert got.keys() == held.keys()
    assert [name for name, value in held.items() if not torch.equal(got[name], value)] == []


GPT2 = {
    "tensor": Run(stage=3, tp=2, precision=BF16, gpt2=True),
    "alone": Run(stage=0, precision=BF16, gpt2=True),
    "data": Run(stage=2, dp=4, precision={**REMAINDER, "moments": "bf16"}, gpt2=True),
}


def published(rank: int, ranks: int, run: Run, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The states that `run` loads, and what it writes as transformers does, in `out`."""
    made = cut_runs.build(run)
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder), every=1), made.sharded, made.optim) as files:
        files.resume("auto")
    dzero.save_pretrained(made.sharded, out)
    return cut_runs.states(made)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("tensor", "alone"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("tensor", "data"), ("data", "tensor"))),
    ],
)
def test_fused_projections_are_whole_in_a_checkpoint_and_in_what_is_published(
    pool: Pool, tmp_path: Path, source: str, target: str
) -> None:
    """Query, key and value of GPT-2 are the columns of one matrix, of which a rank of tp has some of each."""
    run, out = GPT2[target], tmp_path / "out"
    held = pool.run(cut_runs.saved, GPT2[source].ranks, GPT2[source], tmp_path, timeout_s=300)[0]
    got = pool.run(published, run.ranks, run, tmp_path, out, timeout_s=300)[0]
    assert got.keys() == held.keys()
    for key, value in held.items():  # moments and working copies may be narrower; masters are what they were
        if not key.startswith("param"):
            assert torch.equal(value.to(got[key].dtype), got[key]), key
            assert value.dtype == got[key].dtype or key.startswith("exp_avg")
    stored = load_file(out / "model.safetensors")
    params = {key.removeprefix("param model."): value for key, value in got.items() if key.startswith("param")}
    assert params.keys() <= stored.keys()
    assert [name for name, value in params.items() if not torch.equal(value, stored[name])] == []
