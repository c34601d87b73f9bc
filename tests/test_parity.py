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


def name(cell: Cell) -> str:
    return f"stage{cell.stage}-{cell.precision}-M{cell.microbatches}-{cell.master}-{cell.net}-{cell.ranks}ranks"


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("cell", parity_cells.pairwise_cover(), ids=name)
def test_stage_parity(pool: Pool, cell: Cell) -> None:
    result, (want,) = parity_cells.train_beside_oracles(pool, cell)
    assert parity_cells.differences(result, want) == []


@pytest.mark.slow
@pytest.mark.parametrize("cell", parity_cells.full_product(), ids=name)
def test_stage_parity_full_product(pool: Pool, cell: Cell) -> None:
    test_stage_parity(pool, cell)
