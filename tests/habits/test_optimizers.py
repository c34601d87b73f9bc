"""One optimizer after another: what the first one found out in fp32 is not lost."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models_of_torch import HOST, Net
from parity_cells import master_of
from pool import Pool
from torch import Tensor
from training_loops import params_of, snapshot, unequal

import dzero

RULES: dict[str, Any] = {
    "adamw": dzero.AdamW,
    "torch's SGD": lambda sharded: dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=1e-3),
}


def small(*, stage: int = 3, seed: int = 0, offload: dzero.OffloadConfig | None = None, **kinds: Any) -> dzero.Sharded:
    """A small net over all ranks, in bf16 unless said otherwise."""
    torch.manual_seed(seed)
    mesh = dzero.make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    return dzero.shard(Net(), stage, mesh=mesh, precision=dzero.PrecisionConfig(**kinds), offload=offload)


def train(sharded: dzero.Sharded, optim: Any, *, steps: int) -> None:
    for step in range(steps):
        drawn = torch.Generator().manual_seed(10 * step + dist.get_rank())
        sharded.model(torch.randn(3, 4, generator=drawn)).float().square().mean().backward()
        optim.step()


def masters(sharded: dzero.Sharded, optim: Any) -> dict[str, Tensor]:
    """Whole fp32 masters by name, as the state dict has them on any tier, also before the first update."""
    names = {param: name for name, param in sharded.named_params().items()}
    params, states = [p for group in optim.param_groups for p in group["params"]], optim.state_dict()["state"]
    return {f"{names[p]} master": master_of(p, states[at]).cpu().flatten().clone() for at, p in enumerate(params)}


def everything(sharded: dzero.Sharded, optim: Any) -> dict[str, Tensor]:
    optim.synchronize()
    states = {name: value.cpu().clone() for name, value in snapshot(sharded, optim).items()}
    return {**params_of(sharded), **states, **masters(sharded, optim)}


def tiers_of(name: str) -> dzero.OffloadConfig:
    return dzero.OffloadConfig(**TIERS[name])


ON_DISK = dict.fromkeys(("grad", "master", "moments"), "disk")
TIERS: dict[str, dict[str, Any]] = {
    "device": {},
    "host": HOST,
    "host, forward": {**HOST, "overlap": "forward"},
    "host, backward": {**HOST, "overlap": "backward"},
    "disk": ON_DISK,
    "disk, backward": {**ON_DISK, "overlap": "backward"},
    "everything on disk": {**ON_DISK, "param": "disk"},
}


def in_two_phases(rank: int, ranks: int, cells: list[tuple[int, str, str, str]]) -> list[list[str]]:
    """Names of the parameters whose masters are others for the second optimizer."""
    different = []
    for stage, first, second, master in cells:
        sharded = small(stage=stage, master=master)
        optim = RULES[first](sharded)
        train(sharded, optim, steps=2)
        before = masters(sharded, optim)
        del optim
        gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optim = RULES[second](sharded)
        different.append(unequal(masters(sharded, optim), before))
        train(sharded, optim, steps=1)
    return different


def test_a_second_optimizer_begins_with_the_first_ones_masters(pool: Pool) -> None:
    cells = [
        (3, "adamw", "adamw", "fp32"),
        (0, "adamw", "adamw", "remainder"),
        (3, "adamw", "torch's SGD", "fp32"),
        (0, "torch's SGD", "adamw", "fp32"),
    ]
    assert pool.run(in_two_phases, 2, cells) == [[[]] * len(cells)] * 2


def after_another(
    rank: int, ranks: int, rules: tuple[str, str], master: str, tiers: str, between: str
) -> dict[str, Tensor]:
    """Parameters and states of a second optimizer when it is made, and after a step.

    between: what happens before the first one is dropped: a parameter is edited, or a backward is left without step.
    """
    sharded = small(stage=3, master=master, offload=tiers_of(tiers))
    optim = RULES[rules[0]](sharded)
    train(sharded, optim, steps=2)
    if between == "edit":
        with torch.no_grad():
            sharded.named_params()["head.weight"].mul_(0.5).clamp_(min=-0.01)
    if between == "backward":
        sharded.model(torch.ones(2, 4)).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del optim
        sharded.model.zero_grad()
        optim = RULES[rules[1]](sharded)
    made = {f"made {name}": value for name, value in masters(sharded, optim).items()}
    train(sharded, optim, steps=1)
    return made | everything(sharded, optim)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("rules", "master", "tiers", "between"),
    [
        *((("adamw", "adamw"), "fp32", tiers, "edit") for tiers in TIERS if tiers != "device"),
        *((("adamw", "adamw"), "remainder", tiers, "backward") for tiers in ("disk, backward", "host")),
        (("adamw", "torch's SGD"), "fp32", "host", "nothing"),
        (("torch's SGD", "adamw"), "fp32", "host, forward", "edit"),
    ],
)
def test_masters_that_lived_elsewhere_are_handed_on_to_the_bit(
    pool: Pool, rules: tuple[str, str], master: str, tiers: str, between: str
) -> None:
    on_device = pool.run(after_another, 2, rules, master, "device", between)
    elsewhere = pool.run(after_another, 2, rules, master, tiers, between)
    for there, here in zip(elsewhere, on_device, strict=True):
        assert unequal(there, here) == []


def grown(rank: int, ranks: int) -> list[list[str]]:
    """What differs from the device, by tier, where every second parameter is trained from the second step on."""
    ends = []
    for tiers in ("device", "host", "disk"):
        sharded = small(stage=3, offload=tiers_of(tiers))
        params = [*sharded.named_params().values()]
        optim = dzero.AdamW(sharded, params[::2])
        train(sharded, optim, steps=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optim.add_param_group({"params": params[1::2]})
        train(sharded, optim, steps=1)
        ends.append(everything(sharded, optim))
    return [unequal(end, ends[0]) for end in ends]


def test_a_group_added_later_has_the_devices_bits_on_every_tier(pool: Pool) -> None:
    assert pool.run(grown, 2) == [[[], [], []]] * 2


def saved_after_an_edit(rank: int, ranks: int, folder: Path) -> list[list[str]]:
    """Names of parameters whose masters, as a checkpoint has them, are not what was written into them."""
    different = []
    for tiers in ("device", "host", "disk"):
        config = dzero.CheckpointConfig(folder=str(folder / tiers))
        sharded = small(stage=3, offload=tiers_of(tiers))
        optim = dzero.AdamW(sharded)
        train(sharded, optim, steps=1)
        with torch.no_grad():
            for param in sharded.model.parameters():
                param.mul_(0.5)
        with dzero.Checkpointer(config, sharded, optim) as checkpoints:
            checkpoints.save(1, {})
            checkpoints.finish()
        other = small(stage=3, seed=1)
        loaded = dzero.AdamW(other)
        with dzero.Checkpointer(config, other, loaded) as checkpoints:
            assert checkpoints.resume("auto") is not None
        saved = {name: master.bfloat16() for name, master in masters(other, loaded).items()}
        written = {f"{name} master": value.cpu().flatten() for name, value in params_of(sharded).items()}
        different.append(unequal(saved, written))
    return different


def test_what_is_saved_right_after_an_edit_has_it(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(saved_after_an_edit, 2, tmp_path) == [[[], [], []]] * 2


WRONG: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"lr": float("nan")},
    {"eps": -1e-8},
    {"weight_decay": -0.1},
    {"betas": (0.9, 1.0)},
    {"betas": (-0.1, 0.9)},
]


def given_wrong_settings(rank: int, ranks: int) -> list[str]:
    """What is told of settings that torch refuses, in arguments and in a group; the model then trains."""
    sharded, told = small(stage=2), []
    for settings in WRONG:
        for args, more in (((), settings), (([{"params": [*sharded.model.parameters()], **settings}],), {})):
            with pytest.raises(ValueError, match="pass") as raised:
                dzero.AdamW(sharded, *args, **more)
            told.append(str(raised.value))
            del raised
            gc.collect()
    train(sharded, dzero.AdamW(sharded), steps=1)
    return told


def test_settings_that_torch_refuses_are_refused(pool: Pool) -> None:
    (told,) = pool.run(given_wrong_settings, 1)
    assert told[0] == told[1] == "lr=-1.0: pass a number that is not negative"
    assert told[-1] == "betas=(-0.1, 0.9): pass two numbers in [0, 1), such as (0.9, 0.999)"


def trained_by_torch(rank: int, ranks: int) -> list[int]:
    """How often a model without an optimizer of ours warned, in 16 and in 32 bits."""
    found = []
    for param in ("bf16", "fp32"):
        sharded = small(stage=2, param=param)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharded.model(torch.zeros(1, 4)).float().sum().backward()
            torch.optim.AdamW(sharded.model.parameters()).step()
        found.append(sum("without fp32 masters" in str(each.message) for each in caught))
    return found


def test_an_optimizer_of_torch_over_16_bit_parameters_warns(pool: Pool) -> None:
    for in_16, in_32 in pool.run(trained_by_torch, 2):
        assert in_16 > 0
        assert in_32 == 0


def with_replaced_lists(rank: int, ranks: int) -> list[str]:
    """What accelerate's `prepare(model, optim)` does with FSDP2: it replaces the lists of parameters of all groups."""
    told = []
    for params in (lambda own: own, lambda own: own[::-1], lambda own: [own[0]] * len(own), lambda own: own[:-1]):
        sharded = small(stage=3, offload=dzero.OffloadConfig(param="host", master="host"))
        optim = dzero.AdamW(sharded, lr=1e-2)
        before = params_of(sharded)
        optim.param_groups[0]["params"] = [*params(optim.param_groups[0]["params"])]
        try:
            train(sharded, optim, steps=1)
            after = params_of(sharded)
            told.append(f"{len(unequal(before, after))} of {len(before)} trained")
        except ValueError as error:
            told.append(str(error))
    return told


@pytest.mark.full("tests/habits/test_optimizer_interface.py::test_lists_of_parameter_groups_may_be_edited")
def test_groups_whose_lists_were_replaced_train_what_they_hold_or_are_refused(pool: Pool) -> None:
    for told in pool.run(with_replaced_lists, 2):
        every, turned, repeated, fewer = told
        count = int(every.split()[0])
        assert every == turned == f"{count} of {count} trained"
        assert f"{count} times, instead of once" in repeated
        assert fewer == f"{count - 1} of {count} trained"
