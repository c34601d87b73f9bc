"""Wherever states live and however the host's work overlaps: the bits of a run with everything on the device."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pairwise
import pytest
from offload_parity import (
    FACTORS,
    KINDS,
    STRESSED,
    Cell,
    allowed,
    compare,
    compare_family,
    cost,
    family,
    name,
    on_disk,
    run,
)
from pool import Pool
from training_loops import unequal

from dzero import OffloadConfig

COVER = pairwise.cover(FACTORS, allowed, cost=cost, tries=200)


def test_cover_has_every_pair_of_values() -> None:
    """Combinations drawn otherwise have no pair that it lacks."""
    draw = random.Random(1)
    rows = ({name: draw.choice(values) for name, values in FACTORS.items()} for _ in range(50_000))
    every = set().union(*(pairwise.pairs(row) for row in rows if allowed(row)))
    assert set().union(*map(pairwise.pairs, COVER)) >= every
    assert len(every) > 750


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("row", COVER, ids=name)
def test_states_elsewhere_give_the_bits_of_the_device(pool: Pool, tmp_path: Path, row: dict[str, Any]) -> None:
    cell = Cell(**row)
    paths = [tmp_path / "a", tmp_path / "b"][: 1 if cell.ranks == 2 else 2]
    for path in paths:
        path.mkdir()
    for differing, skips in pool.run(compare, cell.ranks, cell, paths):
        assert differing == [], cell
        assert skips >= 1


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    "seed", [3, 0, 1, 2, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 220))]
)
def test_delays_change_no_bit(pool: Pool, tmp_path: Path, seed: int) -> None:
    """The tier: disk in two of five; parameters there or on the host at stage 3."""
    tier = "disk" if seed % 5 in (1, 4) else "host"
    precision = ("bf16", "fp32", "fp16")[seed % 3]
    overlap = "forward" if tier == "disk" and precision == "fp32" else ("forward", "backward")[seed // 4 % 2]
    cell = Cell(
        **STRESSED | dict.fromkeys(KINDS if seed % 4 == 3 else KINDS[1:], tier),
        stage=seed % 4,
        microbatches=(1, 4)[seed // 8 % 2],
        overlap=overlap,
        precision=precision,
        ranks=(1, 2)[(seed + seed // 4 + seed // 16) % 2],
    )
    for differing, _ in pool.run(compare, cell.ranks, cell, [tmp_path], seed):
        assert differing == [], cell


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
    want = run(cell, rank, None, 4)
    return [unequal(run(cell, rank, on_disk(OffloadConfig(**each), paths), 4), want) for each in BOUNDARIES]


@pytest.mark.full("tests/offload/test_offload_parity.py::test_states_elsewhere_give_the_bits_of_the_device")
@pytest.mark.parametrize("microbatches", [1, 4])
def test_units_may_be_on_disk_in_part(pool: Pool, tmp_path: Path, microbatches: int) -> None:
    """A part of each kind is on disk, and another part elsewhere."""
    cell = Cell(**STRESSED, stage=2, microbatches=microbatches, overlap="forward", precision="bf16", ranks=2)
    for differing in pool.run(compare_boundaries, 2, cell, [tmp_path]):
        assert differing == [[]] * len(BOUNDARIES)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("max_norm", [8.0, None])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_full_product(
    pool: Pool, tmp_path: Path, tier: str, stage: int, microbatches: int, max_norm: float | None, ranks: int
) -> None:
    cells = family(tier, stage, microbatches, max_norm, ranks)
    assert len(cells) == (21 if stage == 3 else 12)
    for differing in pool.run(compare_family, ranks, cells, [tmp_path], timeout_s=900):
        assert not any(differing.values()), differing
