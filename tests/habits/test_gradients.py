"""What is written into parameters between steps stays there, whatever holds their masters, and every microbatch counts.

What torch users do with gradients is among the loops of test_models_and_loops.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_of_torch import HOST, OPTIONS, RATE, build, whole
from pool import Pool
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from training_loops import params_of, unequal

from dzero import AdamW, OffloadConfig, PrecisionConfig, Sharded, TorchOptimizer, ZeroConfig, make_mesh, shard

LIMIT = 0.01
EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda param: param.clamp_(-LIMIT, LIMIT),
    "of data": lambda param: param.data.clamp_(-LIMIT, LIMIT),
    "by foreach": lambda param: (
        torch._foreach_clamp_max_([param], LIMIT),
        torch._foreach_clamp_min_([param], -LIMIT),
    ),
    "copied": lambda param: param.copy_(param.clamp(-LIMIT, LIMIT)),
}
ALL = {**HOST, "param": "host"}
DISK = dict.fromkeys(("grad", "master", "moments"), "disk")
RULES: dict[str, Callable[[Sharded], Any]] = {
    "adamw": lambda sharded: AdamW(sharded, **OPTIONS),
    "torch's AdamW": lambda sharded: TorchOptimizer(sharded, torch.optim.AdamW, lr=RATE),
}
"""Optimizers whose steps move an element by little more than `RATE`."""


Run = tuple[int, dict[str, str], str]
"""Stage, tiers and the edit."""


def edited(rank: int, ranks: int, rule: str, precision: dict[str, str], runs: list[Run]) -> list[dict[str, Tensor]]:
    """Of each run: the parameters a step after all of them were clamped to `LIMIT`."""
    found = []
    for stage, tiers, edit in runs:
        sharded = shard(
            build("Net"),
            ZeroConfig(stage=stage),
            precision=PrecisionConfig(**precision),
            offload=OffloadConfig(**tiers),
            mesh=make_mesh("cpu", replicate=ranks if stage == 0 else 1),
        )
        optim = RULES[rule](sharded)
        for step in range(2):
            if step == 1:
                with torch.no_grad():
                    for param in sharded.model.parameters():
                        EDITS[edit](param)
            drawn = torch.Generator().manual_seed(10 * step + rank)
            out = sharded.model(torch.randn(3, 4, generator=drawn))
            mse_loss(out.float(), torch.randn(3, 2, generator=drawn)).backward()
            optim.step()
        optim.synchronize()
        found.append(params_of(sharded))
    return found


def check_stays(params: dict[str, Tensor]) -> None:
    """A step moves an element by at most `RATE`, and by its decay."""
    assert max(value.abs().max().item() for value in params.values()) <= LIMIT + 2 * RATE


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("rule", "precision"),
    [
        ("adamw", {"master": "fp32"}),
        ("adamw", {"master": "remainder"}),
        ("adamw", {"param": "fp32"}),
        ("torch's AdamW", {"master": "fp32"}),
        ("torch's AdamW", {"param": "fp32"}),
    ],
    ids=str,
)
def test_parameters_edited_between_steps_stay_edited(pool: Pool, rule: str, precision: dict[str, str]) -> None:
    """Their masters follow, element by element; the bits are those of every stage and every way to edit."""
    runs: list[Run] = [(stage, {}, "in place") for stage in (0, 1)] + [(3, {}, edit) for edit in EDITS]
    first, *others = pool.run(edited, 2, rule, precision, runs)[0]
    check_stays(first)
    assert [unequal(each, first) for each in others] == [[]] * len(others)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("rule", "precision", "tiers"),
    [
        ("adamw", {"master": "fp32"}, [HOST, ALL, DISK]),
        ("adamw", {"master": "remainder"}, [HOST, {**ALL, "overlap": "forward"}]),
        ("adamw", {"param": "fp32"}, [HOST, ALL, {**DISK, "param": "disk"}]),
        ("adamw", {"master": "fp32"}, [{**HOST, "overlap": "backward"}, {**HOST, "overlap": "forward"}]),
        ("torch's AdamW", {"master": "fp32"}, [HOST]),
        ("torch's AdamW", {"param": "fp32"}, [ALL]),
    ],
    ids=str,
)
def test_so_they_do_where_masters_live_elsewhere(
    pool: Pool, rule: str, precision: dict[str, str], tiers: list[dict[str, str]]
) -> None:
    """Bit by bit as on the device; the ways to edit come in turn."""
    ways = itertools.cycle(EDITS)
    runs: list[Run] = [(3, each, edit) for each, edit in zip([{}, *tiers], ways, strict=False)]
    on_device, *elsewhere = pool.run(edited, 2, rule, precision, runs)[0]
    assert [unequal(each, on_device) for each in elsewhere] == [[]] * len(tiers)


def test_edits_of_delayed_parameters_stay(pool: Pool) -> None:
    """The update that is on its way arrives before they are made."""
    for params in pool.run(edited, 2, "adamw", {"master": "fp32"}, [(3, {**HOST, "overlap": "delayed"}, "of data")])[0]:
        check_stays(params)


class Partly(nn.Module):
    """A block with a layer that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def gradients_of_three(rank: int, ranks: int) -> list[list[float]]:
    """By stage: of the last bias in bf16, after three microbatches that each add 1."""
    found = []
    for stage in range(4):
        sharded = shard(nn.Sequential(Partly(), Partly()), ZeroConfig(stage=stage), precision="bf16", microbatches=3)
        for index in range(3):
            with sharded.microbatch(is_last=index == 2):
                sharded.model(torch.ones(1, 4)).float().sum().backward()
        grad = sharded.model.get_parameter("1.used.bias").grad
        found.append(whole(grad).tolist())
    return found


def test_every_microbatch_counts_where_a_parameter_of_the_unit_is_never_used(pool: Pool) -> None:
    assert pool.run(gradients_of_three, 2) == [[[3.0] * 4] * 4] * 2
