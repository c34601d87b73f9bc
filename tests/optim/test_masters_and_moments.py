"""What is stored may shrink: remainders without any change, bf16 moments alike at every stage, 8 bits closely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from many_cells import of_cells
from on_ranks import on_ranks
from pool import Pool
from torch import nn
from training_loops import masters_of, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard


def long_run(rank: int, ranks: int, steps: int, stage: int, precision: dict[str, str]) -> dict[str, Any]:
    """A small regression with odd sizes, on rank-dependent data."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 31), nn.GELU(), nn.Linear(31, 5))
    sharded = shard(model, ZeroConfig(stage=stage), precision=PrecisionConfig(**precision))
    optim = AdamW(sharded, lr=1e-3, max_norm=0.5)
    generator, losses = torch.Generator().manual_seed(rank), []
    weight = torch.randn(9, 5, generator=torch.Generator().manual_seed(99))
    for _ in range(steps):
        x = torch.randn(8, 9, generator=generator)
        loss = (model(x).float() - (x @ weight).tanh()).square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    return {"losses": losses, "params": params_of(sharded), "masters": masters_of(sharded, optim)}


def test_remainders_are_fp32_masters_to_the_bit(pool: Pool) -> None:
    cells = [(5, 2, {"master": master}) for master in ("fp32", "remainder")]
    (fp32, _), (remainder, _) = of_cells(pool, 2, long_run, cells)
    assert fp32["losses"] == remainder["losses"]
    for kind in ("params", "masters"):
        assert unequal(fp32[kind], remainder[kind]) == []
    assert any((master.bfloat16().float() != master).any() for master in remainder["masters"].values())


@on_ranks(2)
def test_stochastically_rounded_moments_are_the_same_however_they_are_cut(rank: int, ranks: int) -> list[str]:
    """The rounding noise is keyed by the global index, so that no cut changes it."""
    results = []
    for stage in (0, 3):
        sharded = sharded_net("uneven", stage=stage, param="bf16", master="remainder", moments="bf16")
        optim = AdamW(sharded, lr=3e-3, max_norm=0.5)
        train(sharded, optim, "uneven", steps=2)
        whole = params_of(sharded) | {f"master {n}": m for n, m in masters_of(sharded, optim).items()}
        for name, param in sharded.named_params().items():
            for key in ("exp_avg", "exp_avg_sq"):
                whole[f"{name}.{key}"] = optim.state[param][key].full_tensor()
        assert whole["embed.weight.exp_avg"].dtype == torch.bfloat16
        results.append(whole)
    return unequal(*results)


@pytest.mark.full("tests/checkpoint/test_any_to_any.py::test_blocks_of_8_bits_that_align_are_the_same_and_others_near")
def test_small_moments_train_like_fp32_moments(pool: Pool) -> None:
    """Tolerance: 5 % of the loss, averaged over the last 20 of 120 steps, in which it falls by more than half."""
    ends = {}
    for moments in ("fp32", "bf16", "int8"):
        losses = pool.run(long_run, 2, 120, 3, {"moments": moments})[0]["losses"]
        ends[moments] = sum(losses[-20:])
        assert ends[moments] < 0.5 * sum(losses[:20])
    for moments in ("bf16", "int8"):
        assert abs(ends[moments] / ends["fp32"] - 1) < 0.05, ends


def over_copies(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """By kind of moments: parameters and this rank's states of a 2 x 2 mesh, with short and empty shards."""
    results = {}
    for moments in ("bf16", "int8"):
        sharded = sharded_net("uneven", stage=2, replicate=2, moments=moments)
        optim = AdamW(sharded, lr=1e-3)
        train(sharded, optim, "uneven", steps=2)
        results[moments] = {"params": params_of(sharded), "states": snapshot(sharded, optim)}
    return results


@pytest.mark.full("tests/checkpoint/test_any_to_any.py::test_blocks_of_8_bits_that_align_are_the_same_and_others_near")
def test_small_moments_over_copies_stay_copies(pool: Pool) -> None:
    """Ranks 0 and 2, and 1 and 3, hold the same shard; moments of 8 bits are padded alike on every rank, and finite."""
    ranks = pool.run(over_copies, 4)
    in_8_bits = [each["int8"]["states"] for each in ranks]
    codes = [{k: t.shape for k, t in each.items() if k.endswith(("_codes", "_scale"))} for each in in_8_bits]
    assert codes[0] == codes[1] != {}
    assert all(torch.isfinite(each.float()).all() for each in in_8_bits[0].values())
    for moments in ("bf16", "int8"):
        for rank, copy in ((0, 2), (1, 3)):
            assert unequal(ranks[rank][moments]["states"], ranks[copy][moments]["states"]) == []
        for other in ranks[1:]:
            assert unequal(ranks[0][moments]["params"], other[moments]["params"]) == []
