"""Whatever is made anew many times in a process leaves no group, descriptor, thread or scratch folder behind."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from made_anew import KINDS, WHAT, cycles, resources
from pool import Pool

COUNTED = len(WHAT) - 1
"""Without memory, which a few cycles say nothing about (`tests/stress/test_soak.py`)."""


def made(rank: int, ranks: int, kind: str, number: int, folder: Path) -> list[str]:
    """What the process has more of after all cycles than after three, in which threads had time to end."""
    early: list[float] = []
    for cycle in cycles(kind, number, folder):
        if cycle == 3:
            early = ended(folder, [])
    late = ended(folder, early)
    told = zip(WHAT, early, late, strict=False)
    return [f"{after:g} {what}, {before:g} before" for what, before, after in told if after > before]


def ended(folder: Path, early: list[float]) -> list[float]:
    """What the process has once it has no more of it than `early`, at the latest after ten seconds."""
    until_s = time.monotonic() + (10 if early else 1)
    while True:
        found = resources(folder)[:COUNTED]
        if time.monotonic() > until_s or (early and all(a <= b for a, b in zip(found, early, strict=True))):
            return found
        time.sleep(0.1)


DEFAULT = ("stage 3", "disk", "checkpoints", "tensor", "pipeline", "another mesh")
IN_FULL = pytest.mark.full("tests/zero/test_made_anew.py::test_what_is_made_anew_leaves_nothing")


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=() if kind in DEFAULT else IN_FULL) for kind in KINDS])
def test_what_is_made_anew_leaves_nothing(pool: Pool, kind: str, tmp_path: Path) -> None:
    before = len(pool.kept)
    assert pool.run(made, 2, kind, 6, tmp_path) == [[], []]
    assert pool.kept[before:] == [], "groups outlive the default group"
