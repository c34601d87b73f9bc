"""Units of which a part of each kind is on disk, and another part elsewhere: the bits of the device."""

from __future__ import annotations

from pathlib import Path

import pytest
from offload_parity import STRESSED, Cell, on_disk, run
from pool import Pool
from training_loops import unequal

from dzero import OffloadConfig

ON_DISK = dict.fromkeys(("grad", "master", "moments"), "disk")
BOUNDARIES = [
    {**ON_DISK, "grad_fraction": 0.1},
    {**ON_DISK, "grad_fraction": 0.85},
    {**ON_DISK, "master_fraction": 0.5},
    {**ON_DISK, "moments_fraction": 0.5},
    {"moments": "disk", "master": "host", "master_fraction": 0.02},
    {"moments": "disk", "master": "disk", "master_fraction": 0.02},
    {"grad": "host", "grad_fraction": 0.5, "master": "disk", "moments": "disk"},
]


def compare_boundaries(rank: int, ranks: int, cell: Cell, paths: list[Path]) -> list[list[str]]:
    """Units of which a part of each kind is on disk, and another part elsewhere."""
    want = run(cell, rank, None, 4)
    return [unequal(run(cell, rank, on_disk(OffloadConfig(**each), paths), 4), want) for each in BOUNDARIES]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_units_may_be_on_disk_in_part(pool: Pool, tmp_path: Path, microbatches: int) -> None:
    cell = Cell(**STRESSED, stage=2, microbatches=microbatches, overlap="forward", precision="bf16", ranks=2)
    for differing in pool.run(compare_boundaries, 2, cell, [tmp_path]):
        assert differing == [[]] * len(BOUNDARIES)
