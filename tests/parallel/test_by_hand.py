"""What benchmarks/parallel.py measures trains alike: the library, and the same built by hand from torch's APIs."""

from __future__ import annotations

import decoders
import pytest
import torch
from pool import Pool

STEPS, SIZES = 4, {"hidden_size": 64, "layers": 4}


def losses_of(rank: int, ranks: int, name: str) -> list[float]:
    """Of each step of a side, as this rank tells them."""
    import parallel_sides

    experts = {"kind": "moe", "ffn_size": 16, "experts": 4, "top_k": 2, "balance": "none"}
    of_kind = experts if parallel_sides.SIDES[name].cut.ep > 1 else {"ffn_size": 64}
    model = decoders.with_values(256, **SIZES, **of_kind)
    step = parallel_sides.build(name, model, samples=4)
    generator = torch.Generator().manual_seed(parallel_sides.reader_of(name, rank))
    batch = torch.randint(0, 256, (4, 33), generator=generator)
    return [float(step(batch)) for _ in range(STEPS)]


@pytest.mark.full("tests/parallel/test_cut_training.py::test_a_cut_model_trains_as_in_one_process")
@pytest.mark.parametrize("cut", ["2_dp4.ep2", "3_cp2.pp2"])
def test_the_library_and_torchs_own_pieces_have_the_same_losses(pool: Pool, cut: str) -> None:
    own, hand = (
        [sum(of_step) / 4 for of_step in zip(*pool.run(losses_of, 4, f"{by}_{cut}", timeout_s=200), strict=True)]
        for by in ("dzero", "hand")
    )
    assert own == pytest.approx(hand, rel=2e-4)  # bf16
    assert own[-1] < own[0] - 0.05
