"""Every wait of dzero/ is needed, and its absence noticed: left out alone, it makes a scenario race."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutations import CAUGHT, ORDERS_NOTHING, UNSEEN
from pool import Pool
from scenarios import SCENARIOS, run
from sites import calls

FEW = {
    "comm/reduction.py ExactReduction._average: work.wait",
    "offload/activations.py ActivationOffload._use: streams.record_stream",
    "offload/executor.py _Lane.copy: streams.synchronize (hold)",
    "optim/column_upload.py ColumnUpload.send: streams.synchronize",
    "optim/grad_accumulation.py UnitGrads.receive: self._sharded.loans.lend (hold)",
}
"""One of each kind, for every run of the tests."""


def test_the_table_names_every_wait_once() -> None:
    """A new one belongs into it, with the scenario that notices its absence (or the reason why none can)."""
    names = [call.name for call in calls()]
    assert {*names} == {*CAUGHT, *ORDERS_NOTHING, *UNSEEN}
    assert len({*names}) == len(CAUGHT) + len(ORDERS_NOTHING) + len(UNSEEN)
    assert len(names) == len({*names} - UNSEEN) + sum(name in UNSEEN for name in names)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in sorted(CAUGHT)]
)
def test_left_out_it_makes_a_race(pool: Pool, tmp_path: Path, name: str) -> None:
    site = next(call.site for call in calls() if call.name == name)
    scenario = CAUGHT[name]
    told = pool.run(run, SCENARIOS[scenario].ranks, scenario, str(tmp_path), site)
    assert any(races for races, _ in told)
