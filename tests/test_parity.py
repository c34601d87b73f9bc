"""Every stage trains exactly as plain single-process training does: parameters, masters, moments, norms, to the bit.

The oracle follows the same numerics contract (rank-ordered fp32 sums, where a stage accumulates,
tests/support/reference.py), so nothing here needs a tolerance, not even between stages 1 and 2 at M > 1: each is
compared with its own order.
"""

from __future__ import annotations

import parity_cells
import pytest
from parity_cells import Cell
from pool import Pool
from recorded import recorded
from training_loops import unequal


def name(cell: Cell) -> str:
    return f"stage{cell.stage}-{cell.precision}-M{cell.microbatches}-{cell.master}-{cell.net}-{cell.ranks}ranks"


def check(pool: Pool, cell: Cell) -> None:
    result, (want,) = parity_cells.train_beside_oracles(pool, cell)
    assert parity_cells.differences(result, want) == []


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("cell", parity_cells.pairwise_cover(), ids=name)
def test_stage_parity(pool: Pool, cell: Cell) -> None:
    check(pool, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", parity_cells.full_product(), ids=name)
def test_stage_parity_full_product(pool: Pool, cell: Cell) -> None:
    check(pool, cell)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("precision", ["", ", fp16", ", fp32"])
def test_stages_agree_to_the_bit_at_one_microbatch(pool: Pool, precision: str) -> None:
    runs = [recorded(pool, f"stage {stage}{precision}") for stage in (0, 1, 2, 3)]
    for other in runs[1:]:
        assert other.norms == runs[0].norms
        assert other.states.keys() == runs[0].states.keys()
        for name, states in other.states.items():
            assert unequal(states, runs[0].states[name]) == []


def test_cover_has_every_pair_of_values() -> None:
    every = set().union(*(parity_cells.pairs(cell) for cell in parity_cells.full_product()))
    assert set().union(*(parity_cells.pairs(cell) for cell in parity_cells.pairwise_cover())) == every
