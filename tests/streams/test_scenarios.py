"""No scenario has two accesses to the same memory that no wait orders."""

from __future__ import annotations

import pytest
from pool import Pool
from scenarios import SCENARIOS, run


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_race(pool: Pool, name: str) -> None:
    races = pool.run(run, SCENARIOS[name].ranks, name)
    assert [race for of_rank in races for race in of_rank] == []
