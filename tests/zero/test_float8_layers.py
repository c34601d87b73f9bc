"""Training with 8-bit products against plain torchao in one process, and what is converted."""

from __future__ import annotations

import parity_cells
import pytest
from parity_cells import Cell
from pool import Pool

from dzero.zero.offload_config import OFFLOADS


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    ("compute", "stage", "microbatches"),
    [
        ("fp8_tensorwise", 3, 1),
        ("fp8_rowwise", 2, 1),
        ("fp8_rowwise", 3, 2),
        *(("fp8_tensorwise", stage, 1) for stage in (0, 1, 2)),
        *(("fp8_rowwise", stage, 1) for stage in (0, 1, 3)),
        ("fp8_tensorwise", 1, 2),
    ],
)
def test_every_stage_has_the_bits_of_plain_torchao(pool: Pool, compute: str, stage: int, microbatches: int) -> None:
    cell = Cell(stage, "bf16", microbatches, "fp32", "even", 2, compute)
    result, (want,) = parity_cells.train_beside_oracles(pool, cell)
    assert parity_cells.differences(result, want) == []
    plain = parity_cells.oracle(Cell(stage, "bf16", microbatches, "fp32", "even", 2))
    assert parity_cells.differences(result, plain)  # 8 bits make a difference
