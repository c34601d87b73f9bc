"""Moments may shrink: those of 16 bits are alike however they are cut, and both they and those of 8 bits train closely.

Remainders have the bits of fp32 masters: tests/test_recorded.py compares both with the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool
from torch import nn
from training_loops import params_of, sharded_net, train, unequal

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard


def states(rank: int, ranks: int, cells: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Of each cell: whole parameters and all that the optimizer keeps of them after two steps."""
    results = []
    for cell in cells:
        sharded = sharded_net("uneven", **cell)
        optim = AdamW(sharded, lr=3e-3, max_norm=0.5)
        train(sharded, optim, "uneven", steps=2)
        found = params_of(sharded)
        for name, param in sharded.named_params().items():
            found |= {f"{name} {key}": whole(value).clone() for key, value in optim.state[param].items()}
        results.append(found)
    return results


def test_stochastically_rounded_moments_are_the_same_however_they_are_cut(pool: Pool) -> None:
    """The rounding noise is keyed by the global index, so that no cut changes it."""
    first, other = pool.run(states, 2, [{"stage": stage, "moments": "bf16"} for stage in (0, 3)])[0]
    assert first["embed.weight exp_avg"].dtype == torch.bfloat16
    assert unequal(first, other) == []


@pytest.mark.full("tests/test_recorded.py::test_a_run_has_the_bits_that_it_had")
def test_small_moments_over_copies_stay_copies(pool: Pool) -> None:
    """Of a 2 x 2 mesh, with short and empty shards: what each rank puts together from its own copy, and is finite."""
    cells = [{"stage": 2, "replicate": 2, "moments": moments} for moments in ("bf16", "int8")]
    first, *others = pool.run(states, 4, cells)
    assert all(each.float().isfinite().all() for found in first for each in found.values())
    for other in others:
        assert [unequal(*pair) for pair in zip(first, other, strict=True)] == [[], []]


def long_run(rank: int, ranks: int, moments: str) -> list[float]:
    """Losses of a small regression with odd sizes, on rank-dependent data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 31), nn.GELU(), nn.Linear(31, 5))
    sharded = shard(model, ZeroConfig(stage=3), precision=PrecisionConfig(moments=moments))
    optim = AdamW(sharded, lr=1e-3, max_norm=0.5)
    generator, losses = torch.Generator().manual_seed(rank), []
    weight = torch.randn(9, 5, generator=torch.Generator().manual_seed(99))
    for _ in range(120):
        x = torch.randn(8, 9, generator=generator)
        loss = (model(x).float() - (x @ weight).tanh()).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return losses


@pytest.mark.full("tests/test_recorded.py::test_a_run_has_the_bits_that_it_had")
def test_small_moments_train_like_fp32_moments(pool: Pool) -> None:
    """Tolerance: 5 % of the loss, averaged over the last 20 of 120 steps, in which it falls by more than half."""
    ends = {}
    for moments in ("fp32", "bf16", "int8"):
        losses = pool.run(long_run, 2, moments)[0]
        ends[moments] = sum(losses[-20:])
        assert ends[moments] < 0.5 * sum(losses[:20])
    for moments in ("bf16", "int8"):
        assert abs(ends[moments] / ends["fp32"] - 1) < 0.05, ends
