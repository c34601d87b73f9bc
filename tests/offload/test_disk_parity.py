"""States on disk: the bits of a run with everything on the device, whatever else lives where."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pairwise
import pytest
from loops import unequal
from pool import Pool
from test_offload_parity import FACTORS, STEPS, STRESSED, Cell, name, offload_of, run

from dzero.zero.tiers import KINDS, DiskConfig, OffloadConfig

DISK_FACTORS: dict[str, tuple[Any, ...]] = {**FACTORS, **dict.fromkeys(KINDS, ("disk", "host", "device"))}


def allowed(row: dict[str, Any]) -> bool:
    tiers = [row[kind] for kind in KINDS]
    return (
        "disk" in tiers
        and (row["overlap"] == "forward" or row["master"] != "device")
        and (row["overlap"] != "backward" or "device" not in tiers[1:])
        and (row["param"] == "device" or (row["stage"] == 3 and row["master"] != "device"))
        and (row["overlap"] == "backward" or row["undo_bytes"] == 1 << 30)
        and (row["states"] != "remainder" or row["precision"] == "bf16")
        and (row["states"] != "int8" or row["master"] == row["moments"])
        and (row["overlap"] != "backward" or row["master"] != "disk" or row["precision"] != "fp32")
        and (row["replicate"] == 1 or (row["ranks"] == 4 and row["stage"] > 0))
    )


def on_disk(offload: OffloadConfig, paths: list[str]) -> OffloadConfig:
    return replace(offload, prefetch_units=1 + len(paths) % 2, disk=DiskConfig(paths=paths, block_bytes=8192))


def compare(rank: int, ranks: int, cell: Cell, paths: list[str]) -> tuple[list[str], int]:
    want = run(cell, rank, None, STEPS)
    got = run(cell, rank, on_disk(offload_of(cell), paths), STEPS)
    # An fp32 parameter is its own master on the device, and has a separate one elsewhere.
    extra = {key for key in got.keys() - want.keys() if key.endswith(".master") and cell.precision == "fp32"}
    return unequal({k: v for k, v in got.items() if k not in extra}, want), int(got["skips"])


@pytest.mark.parametrize("row", pairwise.cover(DISK_FACTORS, allowed), ids=name)
def test_states_on_disk_give_the_bits_of_the_device(pool: Pool, tmp_path: Path, row: dict[str, Any]) -> None:
    cell = Cell(**row)
    paths = [str(tmp_path / "a"), str(tmp_path / "b")][: 1 if cell.ranks == 2 else 2]
    for path in paths:
        Path(path).mkdir()
    for differing, skips in pool.run(compare, cell.ranks, cell, paths):
        assert differing == [], asdict(cell)
        assert skips >= 1


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


def compare_boundaries(rank: int, ranks: int, cell: Cell, paths: list[str]) -> list[list[str]]:
    """Units of which a part of each kind is on disk, and another part elsewhere."""
    want = run(cell, rank, None, 6)
    return [unequal(run(cell, rank, on_disk(OffloadConfig(**each), paths), 6), want) for each in BOUNDARIES]


@pytest.mark.parametrize("microbatches", [1, 4])
def test_units_may_be_on_disk_in_part(pool: Pool, tmp_path: Path, microbatches: int) -> None:
    cell = Cell(**STRESSED, stage=2, microbatches=microbatches, overlap="forward", precision="bf16", ranks=2)
    for differing in pool.run(compare_boundaries, 2, cell, [str(tmp_path)]):
        assert differing == [[]] * len(BOUNDARIES)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Cells that share their run on the device: every set of kinds on disk, the others on the device, and all modes."""

    stage: int
    microbatches: int
    ranks: int

    def cells(self) -> list[Cell]:
        rows = [
            {**STRESSED, **dict(zip(KINDS, tiers, strict=True)), "overlap": overlap, "precision": "bf16"}
            | {"stage": self.stage, "microbatches": self.microbatches, "ranks": self.ranks}
            for tiers in itertools.product(("disk", "device"), repeat=len(KINDS))
            for overlap in ("forward", "step", "backward")
        ]
        return [Cell(**row) for row in rows if allowed(row)]


def compare_family(rank: int, ranks: int, family: Family, paths: list[str]) -> dict[str, list[str]]:
    """Keys that differ, by cell."""
    every = family.cells()
    want = run(every[0], rank, None, STEPS)
    return {
        name(asdict(cell)): unequal(run(cell, rank, on_disk(offload_of(cell), paths), STEPS), want) for cell in every
    }


FAMILIES = [
    Family(stage=stage, microbatches=microbatches, ranks=ranks)
    for stage, microbatches, ranks in itertools.product((0, 1, 2, 3), (1, 4), (1, 2))
]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_full_product_on_disk(pool: Pool, tmp_path: Path, family: Family) -> None:
    for differing in pool.run(compare_family, family.ranks, family, [str(tmp_path)], timeout_s=900):
        assert len(differing) == (21 if family.stage == 3 else 12)
        assert not any(differing.values()), differing
