"""One optimizer after another, and what was written between: what the first one found out in fp32 is not lost."""

from __future__ import annotations

import gc
import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from many_cells import of_cells
from models_of_torch import HOST, OPTIONS, RATE, sharded_of
from on_ranks import on_ranks
from parity_cells import master_of
from pool import Pool
from torch import Tensor, nn
from training_loops import params_of, snapshot, unequal

import dzero

LIMIT = 0.01
RULES: dict[str, Callable[[dzero.Sharded], Any]] = {
    "adamw": lambda sharded: dzero.AdamW(sharded, **OPTIONS),
    "torch's AdamW": lambda sharded: dzero.TorchOptimizer(sharded, torch.optim.AdamW, lr=RATE),
    "torch's SGD": lambda sharded: dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=RATE),
}
"""Optimizers whose steps move an element by little more than `RATE`."""
EDITS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda param: param.clamp_(-LIMIT, LIMIT),
    "of data": lambda param: param.data.clamp_(-LIMIT, LIMIT),
    "by foreach": lambda param: (torch._foreach_clamp_max_([param], LIMIT), torch._foreach_clamp_min_([param], -LIMIT)),
    "copied": lambda param: param.copy_(param.clamp(-LIMIT, LIMIT)),
}
DISK = dict.fromkeys(("grad", "master", "moments"), "disk")
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": HOST,
    "host, parameters too": {**HOST, "param": "host"},
    "host, forward": {**HOST, "overlap": "forward"},
    "host, backward": {**HOST, "overlap": "backward"},
    "disk": DISK,
    "disk, backward": {**DISK, "overlap": "backward"},
    "everything on disk": {**DISK, "param": "disk"},
}


def small(stage: int, tiers: str = "device", **kinds: Any) -> dzero.Sharded:
    """A small net over all ranks, in bf16 unless said otherwise."""
    return sharded_of("Net", stage, offload=TIERS[tiers], precision={"param": "bf16", **kinds})


def train(sharded: dzero.Sharded, optim: Any, *, steps: int) -> None:
    dtype = next(sharded.model.parameters()).dtype
    for step in range(steps):
        drawn = torch.Generator().manual_seed(10 * step + dist.get_rank())
        sharded.model(torch.randn(3, 4, generator=drawn).to(dtype)).float().square().mean().backward()
        optim.step()


def edit(sharded: dzero.Sharded, how: str) -> None:
    with torch.no_grad():
        for param in sharded.model.parameters():
            EDITS[how](param)


def masters(sharded: dzero.Sharded, optim: Any) -> dict[str, Tensor]:
    """Whole fp32 masters by name, as the state dict has them on any tier, also before the first update."""
    names = {param: name for name, param in sharded.named_params().items()}
    params, states = [p for group in optim.param_groups for p in group["params"]], optim.state_dict()["state"]
    return {f"{names[p]} master": master_of(p, states[at]).cpu().flatten().clone() for at, p in enumerate(params)}


def edited(rank: int, ranks: int, rule: str, stage: int, tiers: str, how: str, **kinds: Any) -> dict[str, Tensor]:
    """The parameters a step after all of them were clamped to `LIMIT`."""
    sharded = small(stage, tiers, **kinds)
    optim = RULES[rule](sharded)
    train(sharded, optim, steps=1)
    edit(sharded, how)
    train(sharded, optim, steps=1)
    optim.synchronize()
    return params_of(sharded)


def everywhere(rank: int, ranks: int, rule: str, kinds: dict[str, str], cells: list[Any]) -> list[dict[str, Tensor]]:
    return [edited(rank, ranks, rule, *cell, **kinds) for cell in cells]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("rule", "kinds", "tiers"),
    [
        ("adamw", {"master": "fp32"}, ["host", "host, parameters too", "disk", "host, backward", "host, forward"]),
        ("adamw", {"master": "remainder"}, ["host", "host, forward"]),
        ("adamw", {"param": "fp32"}, ["host", "host, parameters too", "everything on disk"]),
        ("torch's AdamW", {"master": "fp32"}, ["host"]),
        ("torch's AdamW", {"param": "fp32"}, ["host, parameters too"]),
    ],
)
def test_parameters_edited_between_steps_stay_edited(
    pool: Pool, rule: str, kinds: dict[str, str], tiers: list[str]
) -> None:
    """Their masters follow, element by element, to the bits of every stage, every way to edit, and every tier."""
    cells = [(stage, "device", "in place") for stage in (0, 1)] + [(3, "device", how) for how in EDITS]
    cells += [(3, tier, how) for tier, how in zip(tiers, itertools.cycle(EDITS), strict=False)]
    first, *others = pool.run(everywhere, 2, rule, kinds, cells)[0]
    # A step moves an element by at most RATE, and by its decay.
    assert max(value.abs().max().item() for value in first.values()) <= LIMIT + 2 * RATE
    assert [unequal(each, first) for each in others] == [[]] * len(others)


def test_edits_of_delayed_parameters_stay(pool: Pool) -> None:
    """The update that is on its way arrives before they are made."""
    for params in pool.run(edited_while_delayed, 2):
        assert max(value.abs().max().item() for value in params.values()) <= LIMIT + 2 * RATE


def edited_while_delayed(rank: int, ranks: int) -> dict[str, Tensor]:
    sharded = sharded_of("Net", 3, offload={**HOST, "overlap": "delayed"}, precision={"param": "bf16"})
    optim = RULES["adamw"](sharded)
    train(sharded, optim, steps=1)
    edit(sharded, "of data")
    train(sharded, optim, steps=1)
    optim.synchronize()
    return params_of(sharded)


def after_another(
    rank: int, ranks: int, stage: int, rules: tuple[str, str], master: str, tiers: str, between: str
) -> tuple[list[str], dict[str, Tensor]]:
    """Masters that a second optimizer has not from the first; its masters, and all that it has after a step.

    between: what happens before the first one is dropped: a parameter is edited, or a backward is left without step.
    """
    sharded = small(stage, tiers, master=master)
    optim = RULES[rules[0]](sharded)
    train(sharded, optim, steps=2)
    if between == "edit":
        edit(sharded, "in place")
    if between == "backward":
        sharded.model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean().backward()
    kept = {} if between == "edit" else masters(sharded, optim)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del optim
        gc.collect()
        sharded.model.zero_grad()
        optim = RULES[rules[1]](sharded)
    made = masters(sharded, optim)
    lost = [name for name, master in kept.items() if not torch.equal(made[name], master)]
    train(sharded, optim, steps=1)
    optim.synchronize()
    states = {name: value.cpu().clone() for name, value in snapshot(sharded, optim).items()}
    found = {f"made {name}": master for name, master in made.items()}
    return lost, {**found, **params_of(sharded), **states, **masters(sharded, optim)}


TWICE, TO_SGD, FROM_SGD = ("adamw", "adamw"), ("adamw", "torch's SGD"), ("torch's SGD", "adamw")


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    ("stage", "rules", "master", "tiers", "between"),
    [
        (3, TWICE, "fp32", "host, forward", "edit"),
        (0, TWICE, "remainder", "device", "nothing"),
        (0, FROM_SGD, "fp32", "device", "nothing"),
        (3, TO_SGD, "fp32", "host", "nothing"),
        (3, FROM_SGD, "fp32", "host, forward", "nothing"),
        *((3, TWICE, "fp32", tiers, "edit") for tiers in TIERS if tiers not in ("device", "host, forward")),
        *((3, TWICE, "remainder", tiers, "backward") for tiers in ("disk, backward", "host")),
    ],
)
def test_a_second_optimizer_begins_with_the_first_ones_masters(
    pool: Pool, stage: int, rules: tuple[str, str], master: str, tiers: str, between: str
) -> None:
    """Wherever they lived; it has the bits of the device."""
    cells = [(stage, rules, master, where, between) for where in ("device", tiers)]
    on_device, elsewhere = of_cells(pool, 2, after_another, cells)
    for (lost, here), (lost_elsewhere, there) in zip(on_device, elsewhere, strict=True):
        assert lost == lost_elsewhere == []
        assert unequal(there, here) == []


@on_ranks(2)
def test_what_is_saved_right_after_an_edit_has_it(rank: int, ranks: int, tmp_path: Path) -> list[str]:
    """Names of parameters whose masters, as a checkpoint has them, are not what was written into them."""
    different = list[str]()
    for tiers in ("device", "host", "disk"):
        config = dzero.CheckpointConfig(folder=str(tmp_path / tiers))
        sharded, other = small(3, tiers), small(3)
        optim = dzero.AdamW(sharded)
        train(sharded, optim, steps=1)
        edit(sharded, "in place")
        with dzero.Checkpointer(config, sharded, optim) as checkpoints:
            checkpoints.save(1, {})
            checkpoints.finish()
        loaded = dzero.AdamW(other)
        with dzero.Checkpointer(config, other, loaded) as checkpoints:
            assert checkpoints.resume("auto") is not None
        saved = {name: master.bfloat16() for name, master in masters(other, loaded).items()}
        written = {f"{name} master": value.cpu().flatten() for name, value in params_of(sharded).items()}
        different += unequal(saved, written)
    return different


WRONG: dict[str, dict[str, Any]] = {
    "lr=-1.0: pass a number that is not negative": {"lr": -1.0},
    "lr=nan: ": {"lr": float("nan")},
    "eps=-1e-08: ": {"eps": -1e-8},
    "weight_decay=-0.1: ": {"weight_decay": -0.1},
    "betas=(0.9, 1.0): pass two numbers in [0, 1), such as (0.9, 0.999)": {"betas": (0.9, 1.0)},
    "betas=(-0.1, 0.9): ": {"betas": (-0.1, 0.9)},
}


@on_ranks(1)
def test_settings_that_torch_refuses_are_refused(rank: int, ranks: int) -> None:
    """Settings that torch refuses, in arguments and in a group; the model then trains."""
    sharded = small(2)
    for says, settings in WRONG.items():
        with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
            dzero.AdamW(sharded, **settings)
        with pytest.raises(ValueError, match=f"^{re.escape(says)}"):
            dzero.AdamW(sharded, [{"params": [*sharded.model.parameters()], **settings}])
        gc.collect()
    train(sharded, dzero.AdamW(sharded), steps=1)


def trained_by_torch(rank: int, ranks: int, param: str) -> int:
    """How often a model without an optimizer of ours warned."""
    sharded = small(2, param=param)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(sharded, torch.optim.AdamW(sharded.model.parameters()), steps=1)
    return sum("without fp32 masters" in str(each.message) for each in caught)


def test_an_optimizer_of_torch_over_16_bit_parameters_warns(pool: Pool) -> None:
    in_16, in_32 = of_cells(pool, 2, trained_by_torch, [("bf16",), ("fp32",)])
    assert min(in_16) > 0
    assert in_32 == [0, 0]
