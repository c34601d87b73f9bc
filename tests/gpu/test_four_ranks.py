"""Four processes on one GPU: the real streams, kernels and allocator at every stage, with gloo as their transport.

nccl refuses two ranks on one GPU; `staged_group.py` says what stands in for it. Run with `pytest -m gpu`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import recorded
import torch
from pool import Pool
from recorded import Run
from test_staged_group import HOST, PLAIN, RANKS, train

pytestmark = pytest.mark.gpu


def on_gpu(pool: Pool, folder: Path, run: Run) -> tuple[dict[str, torch.Tensor], list[float | None]]:
    """Masters and norms, which all ranks have to the bit."""
    first, *others = pool.run(train, RANKS, str(folder / "rendezvous"), "cuda", run, timeout_s=180.0)
    for masters, norms in others:
        assert norms == first[1]
        assert all(torch.equal(first[0][name], master) for name, master in masters.items())
    return first


def rows() -> dict[str, Run]:
    found = {}
    for stage, microbatches in itertools.product((0, 1, 2, 3), (1, 2)):
        name = f"stage {stage}, {microbatches} microbatches"
        run = replace(PLAIN, stage=stage, microbatches=microbatches)
        found |= {name: run, f"{name}, host": replace(run, offload=HOST)}
        if stage:
            found[f"{name}, replicas"] = replace(run, replicate=2)
    for overlap in ("forward", "backward"):
        found[overlap] = replace(PLAIN, microbatches=2, offload=HOST | {"overlap": overlap})
    return found


ROWS = rows()


@pytest.mark.parametrize("row", ROWS)
def test_training_follows_the_oracle(pool: Pool, tmp_path: Path, row: str) -> None:
    """In fp32, other matrix kernels and orders of addition differ by about 1e-6 of a gradient from the CPU's; where one
    is near zero, AdamW turns that into a part of a step of lr=3e-3, and 10 steps have been seen to make 1e-4 of it."""
    (masters, norms), want = on_gpu(pool, tmp_path, ROWS[row]), recorded.oracle(ROWS[row])
    assert norms == pytest.approx(want.norms, rel=1e-3)
    assert masters.keys() == want.masters.keys()
    for name, master in want.masters.items():
        torch.testing.assert_close(masters[name], master, rtol=0, atol=2e-3)


def test_all_stages_have_the_same_bits_by_exact_reduction(pool: Pool, tmp_path: Path) -> None:
    """The numerics contract, on the GPU: the same world size and batches, M = 1, bf16."""
    found = []
    for stage in range(4):
        (folder := tmp_path / str(stage)).mkdir()
        run = replace(PLAIN, stage=stage, precision={"param": "bf16"}, zero={"reduction": "exact"})
        found.append(on_gpu(pool, folder, run))
    masters, norms = found[0]
    for other, other_norms in found[1:]:
        assert other_norms == norms
        assert [name for name in masters if not torch.equal(masters[name], other[name])] == []
