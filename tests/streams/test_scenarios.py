"""No scenario has two accesses to the same memory that no wait orders."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from scenarios import SCENARIOS, run
from sites import PACKAGES, calls

FEW = {
    "stage 3, M=2",
    "one rank",
    "native",
    "states over all, host",
    "states over all, M=2, native",
    "penalty before",
    "penalty, M=2",
    "host all, backward",
    "host, one rank, M=2",
    "disk",
    "blocks in two hops",
    "gathered ahead by hand",
    "activations of two streams",
    "columns of a step",
}
"""Those for every run of the tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in SCENARIOS]
)
def test_nothing_races(pool: Pool, tmp_path: Path, name: str) -> None:
    told = pool.run(run, SCENARIOS[name].ranks, name, str(tmp_path))
    assert [race for races, _ in told for race in races] == []
    reached = {site for _, sites in told for site in sites if site.file.split("/")[0] in PACKAGES}
    assert reached <= {call.site for call in calls()}, "a wait that sites.py does not find"
