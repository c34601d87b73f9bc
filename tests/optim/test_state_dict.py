"""States survive saving and loading to the bit: torch's state dicts, DCP's helpers, DCP files, other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool, WorkerError
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from training_loops import masters_of, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, Sharded, TorchOptimizer

RULES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01}),
}


def pair(net: str, rule: str, seed: int = 0, **kwargs: Any) -> tuple[Sharded, Any]:
    """A net and its optimizer; another seed gives other values, which loading has to replace."""
    sharded = sharded_net(net, seed=seed, **kwargs)
    if rule == "AdamW":
        return sharded, AdamW(sharded, lr=3e-3, max_norm=1.0)
    return sharded, TorchOptimizer(sharded, RULES[rule][0], max_norm=1.0, **RULES[rule][1])


def inner_states(sharded: Sharded, optim: Any) -> dict[str, torch.Tensor]:
    """Whole tensors of everything in a state dict, by parameter and key."""
    packed, flat, named = optim.state_dict(), {}, {param: name for name, param in sharded.named_params().items()}
    names = [named[p] for group in optim.param_groups for p in group["params"]]
    for index, states in packed["state"].items():
        for key, value in states.items():
            if isinstance(value, torch.Tensor):
                flat[f"{names[index]}.{key}"] = whole(value).clone()
    return flat


Found = dict[str, torch.Tensor]


def through_dcp(
    rank: int, ranks: int, folder: str, rule: str, kwargs: dict[str, Any], seed: int
) -> tuple[Found, Found]:
    """Seed 0 trains and saves, another loads: whole tensors and settings of what was saved or loaded; this rank's
    tensors a step later. pytorch/pytorch#140900 reports that `initial_lr` is lost."""
    sharded, optim = pair("uneven", rule, seed=seed, **kwargs)
    settings = {"lr": 0.02, "initial_lr": 0.05, "weight_decay": 0.07} if seed == 0 else {"initial_lr": 7.0}
    optim.param_groups[0].update(settings)  # as a schedule and a loop write them
    if seed == 0:
        train(sharded, optim, "uneven", steps=2)
    before = inner_states(sharded, optim)
    model, states = get_model_state_dict(sharded.model), get_optimizer_state_dict(sharded.model, optim)
    if seed == 0:
        assert unequal(inner_states(sharded, optim), before) == []  # asking changes nothing
        dcp.save({"model": model, "optim": states}, checkpoint_id=folder)
    else:
        dcp.load({"model": model, "optim": states}, checkpoint_id=folder)
        set_model_state_dict(sharded.model, model)
        set_optimizer_state_dict(sharded.model, optim, states)
    found = params_of(sharded) | inner_states(sharded, optim)
    found |= {key: torch.tensor(optim.param_groups[0][key]) for key in ("lr", "initial_lr", "weight_decay")}
    if isinstance(optim, AdamW):
        found |= {f"master {name}": each for name, each in masters_of(sharded, optim).items()}
    train(sharded, optim, "uneven", steps=1)
    return found, snapshot(sharded, optim)


CHECKPOINTS = [
    ("AdamW", {"stage": 3, "param": "bf16", "master": "remainder", "moments": "bf16"}, (2, 1)),
    ("AdamW", {"stage": 3, "param": "bf16", "master": "fp32"}, (2, 2)),
    ("AdamW", {"stage": 1, "param": "bf16", "master": "remainder"}, (4, 1)),
    ("AdamW", {"stage": 3, "param": "fp32"}, (4, 1)),
    ("AdamW", {"stage": 1, "param": "fp32"}, (2, 2)),
    ("AdamW", {"stage": 2, "param": "bf16", "master": "remainder", "moments": "bf16"}, (2, 2)),
    ("AdamW", {"stage": 0, "param": "fp16", "moments": "int8"}, (2, 2)),
    ("AdamW", {"stage": 2, "param": "bf16", "moments": "int8"}, (2, 2)),
    ("SGD", {"stage": 3, "param": "bf16"}, (2, 4)),
    ("SGD", {"stage": 3, "param": "bf16"}, (2, 2)),
    ("Adagrad", {"stage": 2, "param": "fp32"}, (4, 1)),
    ("Adagrad", {"stage": 1, "param": "fp32"}, (2, 2)),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("rule", "kwargs", "worlds"), CHECKPOINTS, ids=str)
def test_dcp_files_load_exactly_into_another_world_size_and_go_on_in_the_same(
    pool: Pool, tmp_path: Path, rule: str, kwargs: dict[str, Any], worlds: tuple[int, int]
) -> None:
    saved = pool.run(through_dcp, worlds[0], str(tmp_path), rule, kwargs, 0)
    loaded = pool.run(through_dcp, worlds[1], str(tmp_path), rule, kwargs, 1)
    assert [unequal(each, saved[0][0]) for each, _ in loaded] == [[]] * worlds[1]
    if worlds[0] == worlds[1]:
        assert [unequal(ours, theirs) for (_, ours), (_, theirs) in zip(loaded, saved, strict=True)] == [[]] * worlds[1]


@pytest.mark.full("tests/optim/test_state_dict.py::test_states_of_another_kind_dtype_or_number_are_refused_by_name")
def test_eight_bit_states_refuse_another_world_size(pool: Pool, tmp_path: Path) -> None:
    """Their blocks follow the shards: two ranks of 512 codes and one of 1024 would be as long, and shifted."""
    kwargs = {"stage": 3, "param": "bf16", "moments": "int8"}
    pool.run(through_dcp, 2, str(tmp_path), "AdamW", kwargs, 0)
    with pytest.raises(WorkerError, match=r"[Ss]ize mismatch"):
        pool.run(through_dcp, 1, str(tmp_path), "AdamW", kwargs, 1)


@on_ranks(2)
def test_states_of_another_kind_dtype_or_number_are_refused_by_name(rank: int, ranks: int) -> None:
    _, fp32 = pair("even", "AdamW", param="bf16")
    _, remainder = pair("even", "AdamW", param="bf16", master="remainder")
    _, bf16 = pair("even", "AdamW", param="bf16", moments="bf16")
    sharded = pair("even", "AdamW", param="bf16")[0]
    fewer = AdamW(sharded, list(sharded.named_params().values())[:2])
    for source, says in (
        (remainder, r"state dict.*'remainder'.*set precision\.master"),
        (bf16, r"exp_avg: the state dict has torch\.bfloat16"),
        (fewer, r"state dict.*groups of \[2\] parameters"),
    ):
        with pytest.raises(ValueError, match=says):
            fp32.load_state_dict(source.state_dict())
