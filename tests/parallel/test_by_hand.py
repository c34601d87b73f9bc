"""What benchmarks/parallel.py measures trains alike: the library, and the same built by hand from torch's APIs."""

from __future__ import annotations

import pytest
from pool import Pool
from side_cases import losses_of

FACTORINGS = ["3_cp2.pp2", "2_dp4.ep2"]
MORE = [
    "2_dp2.tp2",
    "3_dp4",
    "1_tp4",
    "2_dp2.cp2",
    "3_cp4",
    "2_cp2.tp2",
    "1_dp2.pp2",
    "3_dp2.pp2",
    "1_tp2.pp2",
    "1_pp4",
    "3_dp4.ep4",
]


@pytest.mark.parametrize("cut", [*FACTORINGS, *(pytest.param(cut, marks=pytest.mark.slow) for cut in MORE)])
def test_the_library_and_torchs_own_pieces_have_the_same_losses(pool: Pool, cut: str) -> None:
    own, hand = (
        [sum(of_step) / 4 for of_step in zip(*pool.run(losses_of, 4, f"{by}_{cut}", timeout_s=200), strict=True)]
        for by in ("dzero", "hand")
    )
    assert own == pytest.approx(hand, rel=2e-4)  # bf16
    assert own[-1] < own[0] - 0.05
