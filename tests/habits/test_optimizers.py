"""One optimizer after another: what the first one found out in fp32 is not lost."""

from __future__ import annotations

import gc
import re
import warnings
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import two_optimizers
from loops_of_torch import whole
from pool import Pool
from torch import Tensor
from training_loops import params_of, sharded_net, train, unequal
from two_optimizers import optimizers_of, sharded_judged

from dzero import AdamW, CheckpointConfig, Checkpointer, OffloadConfig, PrecisionConfig, Sharded, TorchOptimizer
from dzero.optim.base import MasterOptimizer
from dzero.zero.dtensors import local_of
from dzero.zero.rounding import join

RULES: dict[str, Any] = {
    "adamw": AdamW,
    "torch's SGD": lambda sharded: TorchOptimizer(sharded, torch.optim.SGD, lr=1e-3),
}


def masters(sharded: Sharded, optim: MasterOptimizer) -> dict[str, Tensor]:
    """This rank's fp32 masters, flat."""
    found = {}
    for name, param in sharded.named_params().items():
        if isinstance(optim, TorchOptimizer):
            found[name] = optim._held[param].master.detach().clone().view(-1)
            continue
        states = optim.state[param]
        flat = {key: local_of(value).view(-1) for key, value in states.items()}
        local = local_of(param.detach()).view(-1)
        found[name] = flat["master"].clone() if "master" in flat else join(local, flat["remainder"])
    return found


def in_two_phases(rank: int, ranks: int, stage: int, first: str, second: str, master: str) -> list[str]:
    """Names of the parameters whose masters are others for the second optimizer."""
    sharded = sharded_net(stage=stage, master=master)
    optim = RULES[first](sharded)
    train(sharded, optim, steps=3)
    before = masters(sharded, optim)
    del optim
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim = RULES[second](sharded)
    different = unequal(masters(sharded, optim), before)
    train(sharded, optim, steps=1)
    return different


@pytest.mark.parametrize(
    ("first", "second", "master"),
    [
        ("adamw", "adamw", "fp32"),
        ("adamw", "adamw", "remainder"),
        ("adamw", "torch's SGD", "fp32"),
        ("torch's SGD", "adamw", "fp32"),
    ],
)
def test_a_second_optimizer_begins_with_the_first_ones_masters(
    pool: Pool, first: str, second: str, master: str
) -> None:
    for stage in (0, 3):
        assert pool.run(in_two_phases, 2, stage, first, second, master) == [[], []]


def after_another(
    rank: int, ranks: int, rules: tuple[str, str], master: str, tiers: dict[str, str], between: str
) -> dict[str, Tensor]:
    """Parameters and masters of a second optimizer when it is made, and after two steps.

    between: what happens before the first one is dropped: a parameter is edited, or a backward is left without step.
    """
    sharded = sharded_net(stage=3, master=master, offload=OffloadConfig(**tiers) if tiers else None)
    optim = RULES[rules[0]](sharded)
    train(sharded, optim, steps=3)
    if between == "edit":
        with torch.no_grad():
            sharded.named_params()["head.weight"].mul_(0.5).clamp_(min=-0.01)
    if between == "backward":
        sharded.model(torch.ones(2, 8, dtype=torch.int64)).square().mean().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del optim
        sharded.model.zero_grad()
        optim = RULES[rules[1]](sharded)
    found: dict[str, Tensor] = {}

    def look(moment: str) -> None:
        def put(name: str, key: str, tensor: Tensor) -> None:
            found[f"{moment} {name} {key}"] = tensor.cpu().clone()

        optim.synchronize()
        for unit in sharded.units:
            optim.export_state(unit, put)

    look("made")
    train(sharded, optim, steps=2)
    look("trained")
    return found | {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()}


TIERS: dict[str, dict[str, str]] = {
    "host": dict.fromkeys(("grad", "master", "moments"), "host"),
    "host, forward": {**dict.fromkeys(("grad", "master", "moments"), "host"), "overlap": "forward"},
    "host, backward": {**dict.fromkeys(("grad", "master", "moments"), "host"), "overlap": "backward"},
    "disk": dict.fromkeys(("grad", "master", "moments"), "disk"),
    "disk, backward": {**dict.fromkeys(("grad", "master", "moments"), "disk"), "overlap": "backward"},
    "everything on disk": dict.fromkeys(("param", "grad", "master", "moments"), "disk"),
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("rules", "master", "tiers"),
    [
        *((("adamw", "adamw"), "fp32", tiers) for tiers in TIERS),
        *((("adamw", "adamw"), "remainder", tiers) for tiers in ("host", "disk, backward")),
        (("adamw", "torch's SGD"), "fp32", "host"),
        (("torch's SGD", "adamw"), "fp32", "host, forward"),
    ],
)
def test_masters_that_lived_elsewhere_are_handed_on_to_the_bit(
    pool: Pool, rules: tuple[str, str], master: str, tiers: str
) -> None:
    for between in ("nothing", "edit", "backward"):
        on_device = pool.run(after_another, 2, rules, master, {}, between)
        elsewhere = pool.run(after_another, 2, rules, master, TIERS[tiers], between)
        for there, here in zip(elsewhere, on_device, strict=True):
            assert unequal(there, here) == [], between


def grown(rank: int, ranks: int, tiers: dict[str, str]) -> dict[str, Tensor]:
    """Parameters and masters where every second parameter is trained from the third step on."""
    sharded = sharded_net(stage=3, offload=OffloadConfig(**tiers) if tiers else None)
    params = [*sharded.named_params().values()]
    optim = AdamW(sharded, params[::2])
    train(sharded, optim, steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optim.add_param_group({"params": params[1::2]})
    train(sharded, optim, steps=2)
    states = optim.state_dict()["state"]
    masters = {str(number): whole(each["master"]).cpu().clone() for number, each in states.items()}
    return {name: whole(param.detach()).clone() for name, param in sharded.named_params().items()} | masters


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_group_added_later_has_the_device_s_bits_on_every_tier(pool: Pool, tier: str) -> None:
    on_device = pool.run(grown, 2, {})[0]
    assert unequal(pool.run(grown, 2, dict.fromkeys(("grad", "master", "moments"), tier))[0], on_device) == []


def saved_after_an_edit(rank: int, ranks: int, tiers: dict[str, str]) -> list[str]:
    """Names of parameters whose masters, as a checkpoint would have them, are not what was written into them."""
    sharded = sharded_net(stage=3, offload=OffloadConfig(**tiers) if tiers else None)
    optim = AdamW(sharded)
    train(sharded, optim, steps=2)
    with torch.no_grad():
        for param in sharded.model.parameters():
            param.mul_(0.5)
    found = {}
    for unit in sharded.units:
        optim.export_state(
            unit, lambda name, key, tensor: found.update({name: tensor.clone()}) if key == "master" else None
        )
    optim.synchronize()
    shards = {name: local_of(param.detach()).view(-1).cpu() for name, param in sharded.named_params().items()}
    return unequal({name: master.cpu().bfloat16() for name, master in found.items()}, shards)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_what_is_saved_right_after_an_edit_has_it(pool: Pool, tier: str) -> None:
    tiers = {} if tier == "device" else dict.fromkeys(("grad", "master", "moments"), tier)
    assert pool.run(saved_after_an_edit, 2, tiers) == [[], []]


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_optimizers_train_their_parts_as_in_torch(pool: Pool, stage: int, ranks: int) -> None:
    for units, loop, microbatches in product(two_optimizers.UNITS, two_optimizers.LOOPS, [1, 4]):
        expected = two_optimizers.in_torch(ranks, loop, microbatches)
        for found in pool.run(two_optimizers.in_dzero, ranks, stage, units, loop, microbatches):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=f"{units}, {loop}, {microbatches}")


def refused_beside_another(rank: int, ranks: int, folder: Path) -> list[str]:
    """What is said of a parameter that has an optimizer, at once and added later, and where two cannot share."""
    told = []
    sharded = sharded_judged(2)
    generator, judge = optimizers_of(sharded)
    with pytest.raises(RuntimeError) as raised:
        AdamW(sharded)
    told.append(str(raised.value))
    with pytest.raises(RuntimeError) as raised:
        judge.add_param_group({"params": generator.param_groups[0]["params"][:1]})
    told.append(str(raised.value))
    assert len(judge.param_groups) == 1
    config = CheckpointConfig(folder=str(folder), every=1)
    others = r"judge\.\d\.(weight|bias): another optimizer updates it"
    with Checkpointer(replace(config, every=None), sharded, generator) as late, pytest.raises(ValueError, match=others):
        late.save(1, {})
    with pytest.raises(ValueError, match=others):
        Checkpointer(config, sharded, generator)
    half = PrecisionConfig(param="fp16")
    for options in ({"offload": OffloadConfig(grad="host", master="host", moments="host")}, {"precision": half}):
        with pytest.raises(RuntimeError) as raised:
            optimizers_of(sharded_judged(2, **options))
        told.append(str(raised.value))
    del generator, late
    gc.collect()
    AdamW(sharded, sharded.model.generator.parameters())  # type: ignore[union-attr]
    return told


def test_a_parameter_has_one_optimizer(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(refused_beside_another, 1, tmp_path):
        for text in told[:2]:
            assert re.match(r"generator\.0\.(weight|bias): its gradients already go to another optimizer", text)
        assert "states off the device" in told[2]
        assert "fp16" in told[3]


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
    sharded, told = sharded_net("even", stage=2), []
    for settings in WRONG:
        for args, more in (((), settings), (([{"params": [*sharded.model.parameters()], **settings}],), {})):
            with pytest.raises(ValueError, match="pass") as raised:
                AdamW(sharded, *args, **more)
            told.append(str(raised.value))
            del raised
            gc.collect()
    train(sharded, AdamW(sharded), steps=1)
    return told


def test_settings_that_torch_refuses_are_refused(pool: Pool) -> None:
    (told,) = pool.run(given_wrong_settings, 1)
    assert told[0] == told[1] == "lr=-1.0: pass a number that is not negative"
    assert told[-1] == "betas=(-0.1, 0.9): pass two numbers in [0, 1), such as (0.9, 0.999)"


def trained_by_torch(rank: int, ranks: int) -> list[int]:
    """How often a model without an optimizer of ours warned, in 16 and in 32 bits."""
    found = []
    for param in ("bf16", "fp32"):
        sharded = sharded_net("even", stage=2, param=param)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sharded.model(torch.zeros(1, 2, dtype=torch.int64)).float().sum().backward()
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
        sharded = sharded_net("even", stage=3, offload=OffloadConfig(param="host", master="host"))
        optim = AdamW(sharded, lr=1e-2)
        before = params_of(sharded)
        optim.param_groups[0]["params"] = [*params(optim.param_groups[0]["params"])]
        try:
            train(sharded, optim, "even", steps=1)
            after = params_of(sharded)
            told.append(f"{len(unequal(before, after))} of {len(before)} trained")
        except ValueError as error:
            told.append(str(error))
        optim.offload.executor.close()
    return told


def test_groups_whose_lists_were_replaced_train_what_they_hold_or_are_refused(pool: Pool) -> None:
    for told in pool.run(with_replaced_lists, 2):
        every, turned, repeated, fewer = told
        count = int(every.split()[0])
        assert every == turned == f"{count} of {count} trained"
        assert f"{count} times, instead of once" in repeated
        assert fewer == f"{count - 1} of {count} trained"
