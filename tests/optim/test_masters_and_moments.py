"""What is stored may shrink: remainders without any change, bf16 moments alike at every stage, 8 bits closely."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn
from training_loops import masters_of, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard


def long_run(rank: int, ranks: int, steps: int, stage: int, precision: dict[str, str]) -> dict[str, Any]:
    """A small regression with odd sizes, on rank-dependent data."""
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


@pytest.mark.full
def test_200_steps_with_remainders_are_200_steps_with_fp32_masters_to_the_bit(pool: Pool) -> None:
    fp32, remainder = (pool.run(long_run, 2, 200, 2, {"master": master})[0] for master in ("fp32", "remainder"))
    assert fp32["losses"] == remainder["losses"]
    assert sum(fp32["losses"][-20:]) < 0.5 * sum(fp32["losses"][:20])
    assert unequal(fp32["params"], remainder["params"]) == []
    assert unequal(fp32["masters"], remainder["masters"]) == []
    low_halves = torch.cat([m.view(-1).view(torch.int32) for m in remainder["masters"].values()]) & 0xFFFF
    assert (low_halves != 0).float().mean() > 0.9  # they did hold what bf16 lacks


def moments_of_stages(rank: int, ranks: int) -> list[dict[str, torch.Tensor]]:
    results = []
    for stage in (0, 1, 2, 3):
        sharded = sharded_net("uneven", stage=stage, param="bf16", master="remainder", moments="bf16")
        optim = AdamW(sharded, lr=3e-3, max_norm=0.5)
        train(sharded, optim, "uneven", steps=3)
        whole = params_of(sharded) | {f"master {n}": m for n, m in masters_of(sharded, optim).items()}
        for name, param in sharded.named_params().items():
            for key in ("exp_avg", "exp_avg_sq"):
                whole[f"{name}.{key}"] = optim.state[param][key].full_tensor()
        results.append(whole)
    return results


def test_stochastically_rounded_moments_are_the_same_at_every_stage_to_the_bit(pool: Pool) -> None:
    """The rounding noise is keyed by the global index, so that no cut changes it."""
    first, *others = pool.run(moments_of_stages, 2)[0]
    assert first["embed.weight.exp_avg"].dtype == torch.bfloat16
    for other in others:
        assert unequal(first, other) == []


@pytest.mark.full
def test_small_moments_train_like_fp32_moments(pool: Pool) -> None:
    """Tolerance: 5 % of the loss, averaged over the last 20 of 120 steps, in which it falls by more than half."""
    ends = {}
    for moments in ("fp32", "bf16", "int8"):
        losses = pool.run(long_run, 2, 120, 3, {"moments": moments})[0]["losses"]
        ends[moments] = sum(losses[-20:])
        assert ends[moments] < 0.5 * sum(losses[:20])
    for moments in ("bf16", "int8"):
        assert abs(ends[moments] / ends["fp32"] - 1) < 0.05, ends


def odd_shards(rank: int, ranks: int) -> list[str]:
    """8-bit moments on short and empty shards stay finite and are padded alike on every rank."""
    sharded = sharded_net("uneven", stage=3, param="bf16", moments="int8")
    optim = AdamW(sharded, lr=3e-3)
    train(sharded, optim, "uneven", steps=2)
    kept = snapshot(sharded, optim)
    assert all(torch.isfinite(t.float()).all() for t in kept.values())
    return [f"{key} {tuple(t.shape)}" for key, t in kept.items() if key.endswith(("_codes", "_scale"))]


def test_eight_bit_moments_have_the_same_shape_on_every_rank(pool: Pool) -> None:
    first, second = pool.run(odd_shards, 2)
    assert first == second != []


def over_copies(rank: int, ranks: int) -> dict[str, dict[str, Any]]:
    """By kind of moments: losses, whole parameters and this rank's states of a 2 x 2 mesh."""
    results = {}
    for moments in ("fp32", "bf16", "int8"):
        sharded = sharded_net("uneven", stage=2, replicate=2, moments=moments)
        optim = AdamW(sharded, lr=1e-3)
        losses = train(sharded, optim, "uneven", steps=5)
        results[moments] = {"losses": losses, "params": params_of(sharded), "states": snapshot(sharded, optim)}
    return results


def test_small_moments_over_copies_stay_copies(pool: Pool) -> None:
    """Ranks 0 and 2, and 1 and 3, hold the same shard."""
    ranks = pool.run(over_copies, 4)
    for moments in ("fp32", "bf16", "int8"):
        for rank, copy in ((0, 2), (1, 3)):
            assert unequal(ranks[rank][moments]["states"], ranks[copy][moments]["states"]) == []
        for other in ranks[1:]:
            assert unequal(ranks[0][moments]["params"], other[moments]["params"]) == []
        torch.testing.assert_close(
            torch.tensor(ranks[0][moments]["losses"]), torch.tensor(ranks[0]["fp32"]["losses"]), rtol=5e-3, atol=0
        )
