"""No scenario has two accesses to the same memory that no wait orders; left out alone, each wait makes one race."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import CAUGHT, ORDERS_NOTHING, UNSEEN
from pool import Pool
from scenarios import SCENARIOS, run
from sites import PACKAGES, calls

FEW = {
    "host, one rank, M=2",
    "host all, backward",
    "disk",
    "activations of two streams",
    "columns of a step",
}
"""Scenarios for every run of the tests; before each landing come those that other kinds of waits need."""
MORE = {
    "one rank",
    "stage 3, M=2",
    "native",
    "states over all, host",
    "states over all, M=2, native",
    "penalty before",
    "penalty, M=2",
    "blocks in two hops",
    "gathered ahead by hand",
}
NEEDED = {
    "offload/activations.py ActivationOffload._use: streams.record_stream",
    "offload/lane.py Lane.copy: streams.synchronize (hold)",
    "optim/column_upload.py ColumnUpload.send: streams.synchronize",
    "optim/grad_accumulation.py UnitGrads.receive: self._sharded.loans.lend (hold)",
}
"""One of each kind that is left out, for every run of the tests."""
NEEDED_TOO = {"comm/reduction.py ExactReduction._average: work.wait"}
LATER = pytest.mark.full("tests/streams/inside/test_scenarios.py::test_nothing_races")


def marks(name: str, first: set[str], second: set[str]) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in first else (LATER,) if name in second else (pytest.mark.slow,)


def test_every_name_of_a_choice_is_one() -> None:
    assert SCENARIOS.keys() >= FEW | MORE
    assert CAUGHT.keys() >= NEEDED | NEEDED_TOO


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name, FEW, MORE)) for name in SCENARIOS])
def test_nothing_races(pool: Pool, tmp_path: Path, name: str) -> None:
    told = pool.run(run, SCENARIOS[name].ranks, name, str(tmp_path))
    assert [race for races, _ in told for race in races] == []
    reached = {site for _, sites in told for site in sites if site.file.split("/")[0] in PACKAGES}
    assert reached <= {call.site for call in calls()}, "a wait that sites.py does not find"


def test_the_table_names_every_wait_once() -> None:
    """A new one belongs into it, with the scenario that notices its absence (or the reason why none can)."""
    names = [call.name for call in calls()]
    assert {*names} == {*CAUGHT, *ORDERS_NOTHING, *UNSEEN}
    assert len({*names}) == len(CAUGHT) + len(ORDERS_NOTHING) + len(UNSEEN)
    assert len(names) == len({*names} - UNSEEN) + sum(name in UNSEEN for name in names)


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name, NEEDED, NEEDED_TOO)) for name in sorted(CAUGHT)])
def test_left_out_it_makes_a_race(pool: Pool, tmp_path: Path, name: str) -> None:
    site = next(call.site for call in calls() if call.name == name)
    scenario = CAUGHT[name]
    told = pool.run(run, SCENARIOS[scenario].ranks, scenario, str(tmp_path), site)
    assert any(races for races, _ in told)
