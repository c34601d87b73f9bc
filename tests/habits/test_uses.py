"""Modules that only some ranks run, and hooks on parameters, are refused before any number is wrong."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from loops import snapshot, unequal
from pool import Pool
from torch import Tensor, nn

from dzero import AdamW, Sharded, ZeroConfig, make_mesh, shard


class Chosen(nn.Module):
    """Experts of one size, of which rank r runs two: number 2r and the next."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = 2 * dist.get_rank()
        out: Tensor = x + self.experts[first](x) + self.experts[first + 1](x)
        return out


def model_of(stage: int) -> Sharded:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Chosen(), nn.Linear(8, 8))
    mesh = make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    return shard(model, ZeroConfig(stage=stage), mesh=mesh, is_unit=lambda module: isinstance(module, Chosen))


def step_of(sharded: Sharded, optim: AdamW) -> str:
    """What a step that must change nothing is told; the states are those before."""
    before = snapshot(sharded, optim)
    sharded.model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises((RuntimeError, ValueError)) as told:
        optim.step()
    assert unequal(snapshot(sharded, optim), before) == []
    return str(told.value)


def other_experts(rank: int, ranks: int, stage: int) -> str:
    sharded = model_of(stage)
    return step_of(sharded, AdamW(sharded))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_that_run_other_modules_of_a_unit_are_told_which(pool: Pool, stage: int) -> None:
    for told in pool.run(other_experts, 2, stage):
        assert "or other modules of them" in told
        assert re.search(
            r"rank 0: the reduced gradients were those of 1\.experts\.0\.weight, 1\.experts\.0\.bias", told
        )
        assert re.search(r"rank 1: the reduced gradients were those of 1\.experts\.2\.weight", told)


def hooked(rank: int, ranks: int, first: bool) -> str:
    sharded = model_of(2)
    param = sharded.named_params()["0.weight"]
    if first:
        param.register_post_accumulate_grad_hook(lambda _: None)
        with pytest.raises(ValueError, match=r"0\.weight has a post-accumulate-grad hook") as told:
            AdamW(sharded)
        return str(told.value)
    optim = AdamW(sharded)
    param.register_post_accumulate_grad_hook(lambda _: None)
    return step_of(sharded, optim)


@pytest.mark.parametrize("first", [True, False], ids=["before the optimizer", "after it"])
def test_a_hook_that_would_see_gradients_before_they_are_whole_is_refused(pool: Pool, first: bool) -> None:
    for told in pool.run(hooked, 1, first):
        assert "0.weight has a post-accumulate-grad hook" in told
        assert "between backward() and step()" in told
