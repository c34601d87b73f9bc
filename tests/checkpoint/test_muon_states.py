"""Muon's states survive checkpoints and state dicts to the bit, at other stages and numbers of ranks too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity_cells import whole
from pool import Pool
from small_runs import Told, settled, write_text
from small_runs import train as train_run
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from training_loops import masters_of, params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, CheckpointConfig, Checkpointer, Muon, MuonConfig, Sharded
from dzero.optim.base import MasterOptimizer

KEYS = ("exp_avg", "exp_avg_sq", "exp_avg_codes", "exp_avg_scale", "step")


def pair(seed: int = 0, exclude: tuple[str, ...] = ("head",), **kind: Any) -> tuple[Sharded, Muon]:
    """Another seed gives other values, which loading has to replace."""
    sharded = sharded_net("uneven", seed=seed, **kind)
    return sharded, Muon(sharded, lr=3e-3, max_norm=1.0, muon=MuonConfig(exclude=[*exclude]))


def everything(sharded: Sharded, optim: AdamW) -> dict[str, torch.Tensor]:
    """Whole tensors: parameters, masters, moments, counts of updates."""
    found = {f"param {name}": value for name, value in params_of(sharded).items()}
    found |= {f"master {name}": value for name, value in masters_of(sharded, optim).items()}
    for name, param in sharded.named_params().items():
        found |= {f"{key} {name}": whole(optim.state[param][key]).clone() for key in KEYS if key in optim.state[param]}
    return found


def saved(rank: int, ranks: int, kind: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    sharded, optim = pair(**kind)
    train(sharded, optim, "uneven", steps=3)
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(3, {})
        checkpoints.finish()
    return everything(sharded, optim)


def passed_on(
    rank: int, ranks: int, kind: dict[str, Any], source: Path, target: Path, steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What was loaded; what was saved anew after `steps` more."""
    sharded, optim = pair(seed=1, **kind)
    with Checkpointer(CheckpointConfig(folder=str(source)), sharded, optim) as checkpoints:
        assert checkpoints.resume("auto") is not None
    loaded = everything(sharded, optim)
    train(sharded, optim, "uneven", steps=steps, seed=2)
    with Checkpointer(CheckpointConfig(folder=str(target)), sharded, optim) as checkpoints:
        checkpoints.save(3 + steps, {})
        checkpoints.finish()
    return loaded, everything(sharded, optim)


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [{"param": "bf16"}, {"param": "bf16", "master": "remainder", "moments": "bf16"}, {"param": "fp32"}],
    ids=str,
)
def test_a_checkpoint_goes_from_four_ranks_to_two_to_one(pool: Pool, tmp_path: Path, kind: dict[str, Any]) -> None:
    """Stage 3, then 1, then 0; the first load, and what two more steps make of it, arrive to the bit."""
    held = pool.run(saved, 4, {"stage": 3, **kind}, tmp_path / "four")[0]
    assert {key for key in held if key.startswith("exp_avg_sq")}.isdisjoint({"exp_avg_sq layers.0.qkv.weight"})
    assert float(held["exp_avg layers.0.qkv.weight"].float().abs().max()) > 0
    two = pool.run(passed_on, 2, {"stage": 1, **kind}, tmp_path / "four", tmp_path / "two", 2)
    assert all(unequal(loaded, held) == [] for loaded, _ in two)
    held = two[0][1]
    ((loaded, _),) = pool.run(passed_on, 1, {"stage": 0, **kind}, tmp_path / "two", tmp_path / "one", 1)
    assert unequal(loaded, held) == []


def test_a_momentum_in_eight_bits_comes_back_as_it_was_stored(pool: Pool, tmp_path: Path) -> None:
    """Into the same shards, where its blocks align."""
    kind = {"stage": 2, "moments": "int8"}
    held = pool.run(saved, 2, kind, tmp_path / "first")[0]
    assert held["exp_avg_codes layers.0.qkv.weight"].unique().numel() > 1
    for loaded, _ in pool.run(passed_on, 2, {**kind, "stage": 3}, tmp_path / "first", tmp_path / "then", 1):
        assert unequal(loaded, held) == []


def refused(rank: int, ranks: int, folder: Path) -> list[str]:
    """What is said to optimizers that hold other states."""
    others: list[MasterOptimizer] = [
        AdamW(sharded_net("uneven", stage=2)),
        pair(exclude=("head", "1"), stage=2)[1],
    ]
    said = []
    for optim in others:
        with (
            Checkpointer(CheckpointConfig(folder=str(folder)), optim._sharded, optim) as checkpoints,
            pytest.raises(ValueError) as error,  # noqa: PT011  # the messages are compared by the caller
        ):
            checkpoints.resume("auto")
        said.append(str(error.value))
    return said


def test_states_of_another_rule_or_of_other_matrices_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(saved, 2, {"stage": 2}, tmp_path)
    rule, matrices = pool.run(refused, 2, tmp_path)[0]
    assert "take optim.rule=muon" in rule
    assert "layers.1.qkv.weight" in matrices
    assert "layers.0.qkv.weight" not in matrices
    assert "optim.muon.exclude" in matrices


def reload(rank: int, ranks: int) -> None:
    """Into a fresh pair by torch's state dicts and by its helpers, then one step of both."""
    for by_helpers, kind in ((False, {"stage": 3}), (True, {"stage": 1, "param": "fp32"}), (True, {"stage": 0})):
        old, old_optim = pair(**kind)
        train(old, old_optim, "uneven", steps=2)
        new, new_optim = pair(seed=1, **kind)
        if by_helpers:
            set_model_state_dict(new.model, get_model_state_dict(old.model))
            packed = copy.deepcopy(get_optimizer_state_dict(old.model, old_optim))
            set_optimizer_state_dict(new.model, new_optim, packed)
        else:
            new.model.load_state_dict(old.model.state_dict())
            new_optim.load_state_dict(copy.deepcopy(old_optim.state_dict()))
        assert unequal(snapshot(new, new_optim), snapshot(old, old_optim)) == []
        for each in ((old, old_optim), (new, new_optim)):
            train(*each, "uneven", steps=1, seed=1)
        assert unequal(snapshot(new, new_optim), snapshot(old, old_optim)) == []


def test_a_fresh_optimizer_continues_from_a_state_dict_to_the_bit(pool: Pool) -> None:
    pool.run(reload, 2)


def through_dcp(rank: int, ranks: int, folder: str, seed: int, kind: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Seed 0 trains and saves, another loads."""
    sharded, optim = pair(seed=seed, **kind)
    if seed == 0:
        train(sharded, optim, "uneven", steps=2)
    model, states = get_model_state_dict(sharded.model), get_optimizer_state_dict(sharded.model, optim)
    if seed == 0:
        dcp.save({"model": model, "optim": states}, checkpoint_id=folder)  # type: ignore[attr-defined]
    else:
        dcp.load({"model": model, "optim": states}, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_model_state_dict(sharded.model, model)
        set_optimizer_state_dict(sharded.model, optim, states)
    return everything(sharded, optim)


def test_dcp_files_load_exactly_into_another_world_size(pool: Pool, tmp_path: Path) -> None:
    held = pool.run(through_dcp, 4, str(tmp_path), 0, {"stage": 3})[0]
    for loaded in pool.run(through_dcp, 2, str(tmp_path), 1, {"stage": 3}):
        assert unequal(loaded, held) == []


def test_a_run_of_the_trainer_moves_what_the_theory_says_and_learns(pool: Pool, tmp_path: Path) -> None:
    data = write_text(tmp_path / "words.txt", words=2000)
    settings = ["optim.rule=muon", "optim.lr=3e-3", "train.steps=12", "data.held_out=0", "launch.workers=2"]
    for stage in (0, 3):
        run = settled(data, *settings, f"zero.stage={stage}")
        told: list[Told] = pool.run(train_run, 2, run, tmp_path, timeout_s=300)
        assert all(each.agrees for each in told)
        assert told[0].losses[-1] < 0.9 * told[0].losses[0]
