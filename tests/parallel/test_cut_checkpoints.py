"""States of a cut model move between any two meshes, to the bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import cut_runs
import pytest
import torch
from cut_runs import Run
from parity_cells import together
from pool import Pool
from safetensors.torch import load_file

import dzero

BF16 = {"param": "bf16"}
REMAINDER = {"param": "bf16", "master": "remainder"}
DENSE = [
    Run(stage=3, tp=2, precision=BF16, layers=4, tied=True),
    Run(stage=1, pp=2, parts=2, schedule="interleaved", microbatches=2, layers=4, tied=True, precision=BF16),
    Run(stage=3, dp=2, tp=2, precision=BF16, layers=4, tied=True),
    Run(stage=1, pp=2, dp=2, parts=2, schedule="interleaved", microbatches=2, layers=4, tied=True, precision=BF16),
    Run(stage=0, precision=BF16, layers=4, tied=True),
    Run(stage=2, pp=2, tp=2, microbatches=2, precision=BF16, layers=4, tied=True),
    Run(stage=3, dp=4, replicate=2, precision=BF16, layers=4, tied=True),
    Run(stage=2, dp=4, precision=BF16, layers=4, tied=True),
]
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
    Run(stage=3, dp=2, ep=4, tp=2, **MIXED),
    Run(stage=0, dp=2, ep=2, pp=2, microbatches=2, **MIXED),
    Run(stage=2, dp=4, **MIXED),
]
MOVES = [(MIXTURES[0], MIXTURES[2]), (DENSE[0], DENSE[1])]
MORE = [each for runs in (DENSE, MATRICES, MIXTURES) for each in pairwise([*runs, runs[0]]) if each not in MOVES]


def check(pool: Pool, folder: Path, source: Run, target: Run) -> None:
    held = together(pool.run(cut_runs.saved, source.ranks, source, folder, timeout_s=300))
    assert len([name for name in held if name.startswith("bias ")]) == (2 if source.experts else 0)
    got = together(pool.run(cut_runs.loaded, target.ranks, target, folder, timeout_s=300))
    assert got.keys() == held.keys()
    assert [name for name, value in held.items() if not torch.equal(got[name], value)] == []


@pytest.mark.parametrize(("source", "target"), MOVES, ids=str)
def test_a_checkpoint_moves_between_meshes_exactly(pool: Pool, tmp_path: Path, source: Run, target: Run) -> None:
    check(pool, tmp_path, source, target)


@pytest.mark.full("tests/parallel/test_cut_checkpoints.py::test_a_checkpoint_moves_between_meshes_exactly")
@pytest.mark.parametrize(("source", "target"), MORE, ids=str)
def test_a_checkpoint_moves_between_more_meshes(pool: Pool, tmp_path: Path, source: Run, target: Run) -> None:
    check(pool, tmp_path, source, target)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [DENSE, MIXTURES], ids=["dense", "mixture"])
def test_a_checkpoint_moves_from_each_mesh_to_each(pool: Pool, tmp_path: Path, runs: list[Run]) -> None:
    for number, source in enumerate(runs):
        for target in runs:
            check(pool, tmp_path / f"{number} {runs.index(target)}", source, target)


GPT2 = [
    Run(stage=3, tp=2, precision=BF16, gpt2=True),
    Run(stage=2, dp=4, precision={**REMAINDER, "moments": "bf16"}, gpt2=True),
    Run(stage=1, tp=4, precision={"param": "fp32"}, gpt2=True),
    Run(stage=0, precision=BF16, gpt2=True),
]


def published(rank: int, ranks: int, run: Run, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """The states that `run` loads, and what it writes as transformers does, in `out`."""
    made = cut_runs.build(run)
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder), every=1), made.sharded, made.optim) as files:
        files.resume("auto")
    dzero.save_pretrained(made.sharded, out)
    return cut_runs.states(made)


@pytest.mark.parametrize(
    ("source", "targets"),
    [
        (0, (3,)),
        *(
            pytest.param(source, targets, marks=pytest.mark.slow)
            for source, targets in ((0, (1, 2)), (1, (0,)), (2, (0, 3)), (3, (0, 2)))
        ),
    ],
)
def test_fused_projections_are_whole_in_a_checkpoint_and_in_what_is_published(
    pool: Pool, tmp_path: Path, source: int, targets: tuple[int, ...]
) -> None:
    """Query, key and value of GPT-2 are the columns of one matrix, of which a rank of tp has some of each."""
    held = pool.run(cut_runs.saved, GPT2[source].ranks, GPT2[source], tmp_path, timeout_s=300)[0]
    for target in targets:
        run, out = GPT2[target], tmp_path / f"out {target}"
        got = pool.run(published, run.ranks, run, tmp_path, out, timeout_s=300)[0]
        assert got.keys() == held.keys()
        exact = [key for key in held if key.startswith(("master", "step"))]
        assert [key for key in exact if not torch.equal(held[key], got[key])] == [], run
        moments = [key for key in held if key.startswith("exp_avg")]
        apart = [key for key in moments if not torch.equal(held[key].to(got[key].dtype).float(), got[key].float())]
        assert apart == [], run
        stored = load_file(out / "model.safetensors")
        params = {key.removeprefix("param model."): got[key] for key in got if key.startswith("param")}
        assert params.keys() <= stored.keys()
        assert [name for name in params if not torch.equal(params[name], stored[name])] == []
