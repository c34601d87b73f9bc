"""States survive saving and loading to the bit: torch's state dicts, DCP's helpers, DCP files, other world sizes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
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

PRECISIONS: list[dict[str, str]] = [
    {"param": "bf16", "master": "fp32"},
    {"param": "bf16", "master": "remainder", "moments": "bf16"},
    {"param": "fp32"},
    {"param": "fp16", "moments": "int8"},
]
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


def reload(rank: int, ranks: int, rule: str, kwargs: dict[str, Any], helpers: bool) -> None:
    """Train, load everything into a fresh pair, and continue both: every bit stays equal.

    helpers: through get_ and set_ of torch.distributed.checkpoint.state_dict.
    """
    old, old_optim = pair("uneven", rule, **kwargs)
    train(old, old_optim, "uneven", steps=2)
    new, new_optim = pair("uneven", rule, seed=1, **kwargs)
    if helpers:
        set_model_state_dict(new.model, get_model_state_dict(old.model))
        before = inner_states(old, old_optim)
        packed = copy.deepcopy(get_optimizer_state_dict(old.model, old_optim))
        assert unequal(inner_states(old, old_optim), before) == []  # asking changes nothing
        set_optimizer_state_dict(new.model, new_optim, packed)
    else:
        new.model.load_state_dict(old.model.state_dict())
        new_optim.load_state_dict(copy.deepcopy(old_optim.state_dict()))
    assert unequal(inner_states(new, new_optim), inner_states(old, old_optim)) == []
    for sharded, optim in ((old, old_optim), (new, new_optim)):
        train(sharded, optim, "uneven", steps=1, seed=1)
    assert unequal(params_of(new), params_of(old)) == []
    assert unequal(snapshot(new, new_optim), snapshot(old, old_optim)) == []


CELLS: list[tuple[str, dict[str, Any]]] = [
    *(("AdamW", {"stage": stage, **precision}) for stage, precision in zip((3, 2, 1, 0), PRECISIONS, strict=True)),
    ("SGD", {"stage": 3, "param": "bf16"}),
    ("Adagrad", {"stage": 1, "param": "fp32"}),
]


@pytest.mark.full("tests/optim/test_state_dict.py::test_dcp_files_load_exactly_into_another_world_size")
@pytest.mark.parametrize(
    ("rule", "kwargs", "helpers"), [(*cell, helpers) for helpers in (True, False) for cell in CELLS]
)
def test_a_fresh_optimizer_continues_from_a_state_dict_to_the_bit(
    pool: Pool, rule: str, kwargs: dict[str, Any], helpers: bool
) -> None:
    pool.run(reload, 2, rule, kwargs, helpers)


def save(rank: int, ranks: int, folder: str, rule: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    sharded, optim = pair("uneven", rule, **kwargs)
    train(sharded, optim, "uneven", steps=2)
    dcp.save(
        {"model": get_model_state_dict(sharded.model), "optim": get_optimizer_state_dict(sharded.model, optim)},
        checkpoint_id=folder,
    )
    return {"params": params_of(sharded), "states": inner_states(sharded, optim), "masters": masters(sharded, optim)}


def load(rank: int, ranks: int, folder: str, rule: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    sharded, optim = pair("uneven", rule, seed=1, **kwargs)
    state: dict[str, Any] = {
        "model": get_model_state_dict(sharded.model),
        "optim": get_optimizer_state_dict(sharded.model, optim),
    }
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(sharded.model, state["model"])
    set_optimizer_state_dict(sharded.model, optim, state["optim"])
    loaded = {"params": params_of(sharded), "states": inner_states(sharded, optim), "masters": masters(sharded, optim)}
    train(sharded, optim, "uneven", steps=1)  # and it goes on
    return loaded


def masters(sharded: Sharded, optim: Any) -> dict[str, torch.Tensor]:
    return masters_of(sharded, optim) if isinstance(optim, AdamW) else {}


CHECKPOINTS = [
    ("AdamW", {"stage": 3, "param": "bf16", "master": "remainder", "moments": "bf16"}, (2, 1)),
    ("AdamW", {"stage": 3, "param": "bf16", "master": "fp32"}, (2, 4)),
    ("AdamW", {"stage": 2, "param": "bf16", "master": "remainder", "moments": "bf16"}, (2, 4)),
    ("AdamW", {"stage": 1, "param": "bf16", "master": "remainder"}, (4, 1)),
    ("AdamW", {"stage": 3, "param": "fp32"}, (4, 1)),
    ("AdamW", {"stage": 2, "param": "bf16", "moments": "int8"}, (2, 2)),
    ("TorchSGD", {"stage": 3, "param": "bf16"}, (2, 4)),
    ("TorchAdagrad", {"stage": 2, "param": "fp32"}, (4, 1)),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("rule", "kwargs", "worlds"), CHECKPOINTS, ids=str)
def test_dcp_files_load_exactly_into_another_world_size(
    pool: Pool, tmp_path: Path, rule: str, kwargs: dict[str, Any], worlds: tuple[int, int]
) -> None:
    rule = rule.removeprefix("Torch")
    saved = pool.run(save, worlds[0], str(tmp_path), rule, kwargs)[0]
    for loaded in pool.run(load, worlds[1], str(tmp_path), rule, kwargs):
        for kind in ("params", "states", "masters"):
            assert unequal(loaded[kind], saved[kind]) == []


@pytest.mark.full("tests/optim/test_state_dict.py::test_states_of_another_kind_dtype_or_number_are_refused_by_name")
def test_eight_bit_states_refuse_another_world_size(pool: Pool, tmp_path: Path) -> None:
    """Their blocks follow the shards: two ranks of 512 codes and one of 1024 would be as long, and shifted."""
    kwargs = {"stage": 3, "param": "bf16", "moments": "int8"}
    pool.run(save, 2, str(tmp_path), "AdamW", kwargs)
    with pytest.raises(WorkerError, match=r"[Ss]ize mismatch"):
        pool.run(load, 1, str(tmp_path), "AdamW", kwargs)


def wrong_states(rank: int, ranks: int) -> list[str]:
    """Messages of loading what does not fit."""
    _, fp32 = pair("even", "AdamW", param="bf16")
    _, remainder = pair("even", "AdamW", param="bf16", master="remainder")
    _, bf16 = pair("even", "AdamW", param="bf16", moments="bf16")
    sharded = pair("even", "AdamW", param="bf16")[0]
    fewer = AdamW(sharded, list(sharded.named_params().values())[:2])
    messages = []
    for target, source in ((fp32, remainder), (fp32, bf16), (fp32, fewer)):
        with pytest.raises(ValueError, match="state dict") as error:
            target.load_state_dict(source.state_dict())
        messages.append(str(error.value))
    return messages


def test_states_of_another_kind_dtype_or_number_are_refused_by_name(pool: Pool) -> None:
    kind, dtype, number = pool.run(wrong_states, 2)[0]
    assert "'remainder'" in kind
    assert "set precision.master" in kind
    assert "exp_avg" in dtype
    assert "torch.bfloat16" in dtype
    assert "groups of [2] parameters" in number
