"""States of rules that need whole matrices survive checkpoints and state dicts to the bit, in any layout.

Muon cuts its momentum as parameters are cut; of a class that is not element-wise, an owner keeps them whole.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity_cells import together, whole
from plain_classes import Lamb, Shampoo
from pool import Pool
from small_runs import settled, train, write_text
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from training_loops import masters_of, params_of, sharded_net, snapshot, unequal
from training_loops import train as train_net

from dzero import AdamW, CheckpointConfig, Checkpointer, Muon, MuonConfig, OffloadConfig, Sharded, TorchOptimizer

HOST = OffloadConfig(grad="host", master="host", moments="host")
RULES = ("shampoo", "muon")


def pair(rule: str, seed: int = 0, exclude: tuple[str, ...] = ("head",), **kind: Any) -> tuple[Sharded, Any]:
    """Another seed gives other values, which loading has to replace."""
    sharded = sharded_net("uneven", seed=seed, **kind)
    if rule == "muon":
        return sharded, Muon(sharded, lr=3e-3, max_norm=1.0, muon=MuonConfig(exclude=[*exclude]))
    return sharded, TorchOptimizer(sharded, {"shampoo": Shampoo, "lamb": Lamb}[rule], elementwise=False, lr=0.02)


def everything(sharded: Sharded, optim: Any) -> dict[str, Tensor]:
    """Whole parameters and masters on every rank, and states: whole, or those of parameters that this rank owns."""
    found = {f"param {name}": value for name, value in params_of(sharded).items()}
    found |= {f"master {name}": value for name, value in masters_of(sharded, optim).items()}
    for name, param in sharded.named_params().items():
        states = {k: v for k, v in optim.state.get(param, {}).items() if k not in ("master", "remainder")}
        found |= {f"{key} {name}": whole(torch.as_tensor(value)).clone() for key, value in states.items()}
    return found


def passed_on(
    rank: int, ranks: int, rule: str, kind: dict[str, Any], source: Path | None, target: Path
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What was loaded, and what was saved anew after two more steps."""
    sharded, optim = pair(rule, seed=0 if source is None else 1, **kind)
    if source is not None:
        with Checkpointer(CheckpointConfig(folder=str(source)), sharded, optim) as checkpoints:
            assert checkpoints.resume("auto") is not None
            assert rule != "lamb" or {type(each.get("step", 0)) for each in optim.state.values()} == {int}
    loaded = everything(sharded, optim)
    train_net(sharded, optim, "uneven", steps=2, seed=2)
    with Checkpointer(CheckpointConfig(folder=str(target)), sharded, optim) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.finish()
    return loaded, everything(sharded, optim)


STORED: dict[str, tuple[str, dict[str, Any]]] = {
    "shampoo": ("shampoo", {"param": "bf16"}),
    "lamb, counts as numbers": ("lamb", {"param": "bf16"}),
    "muon, remainder": ("muon", {"param": "bf16", "master": "remainder", "moments": "bf16"}),
    "muon, fp32": ("muon", {"param": "fp32"}),
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"stage": 3}),
    (1, {"stage": 2, "offload": HOST}),
    (3, {"stage": 0}),
    (2, {"stage": 1}),
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("name", STORED)
def test_states_go_from_layout_to_layout(pool: Pool, tmp_path: Path, name: str) -> None:
    """From two ranks to the host of one, to three, to two; each load and what two more steps make of it arrive."""
    (rule, stored), source, held = STORED[name], None, dict[str, Tensor]()
    for number, (ranks, layout) in enumerate(LAYOUTS):
        runs = pool.run(passed_on, ranks, rule, stored | layout, source, tmp_path / str(number))
        if source is not None:
            assert unequal(together([loaded for loaded, _ in runs]), held) == []
        source, held = tmp_path / str(number), together([then for _, then in runs])
    matrix = "layers.0.qkv.weight"
    if rule == "muon":
        assert f"exp_avg_sq {matrix}" not in held
        assert float(held[f"exp_avg {matrix}"].float().abs().max()) > 0
        return
    assert float(held[f"step {matrix}"]) == 2 * len(LAYOUTS)
    if rule == "shampoo":
        assert held[f"left {matrix}"].shape[0] == held[f"param {matrix}"].shape[0]


@pytest.mark.full("tests/checkpoint/test_any_to_any.py::test_blocks_of_8_bits_that_align_are_the_same_and_others_near")
def test_a_momentum_in_eight_bits_comes_back_as_it_was_stored(pool: Pool, tmp_path: Path) -> None:
    """Into the same shards, where its blocks align."""
    kind = {"stage": 2, "moments": "int8"}
    held = pool.run(passed_on, 2, "muon", kind, None, tmp_path / "first")[0][1]
    assert held["exp_avg_codes layers.0.qkv.weight"].unique().numel() > 1
    for loaded, _ in pool.run(passed_on, 2, "muon", {**kind, "stage": 3}, tmp_path / "first", tmp_path / "then"):
        assert unequal(loaded, held) == []


def refused(rank: int, ranks: int, folder: Path) -> list[str]:
    """What is said to optimizers that hold other states."""
    sharded, said = sharded_net("uneven", stage=2), []
    others: list[tuple[Sharded, Any]] = [(sharded, AdamW(sharded)), pair("muon", exclude=("head", "1"), stage=2)]
    for other in others:
        with (
            Checkpointer(CheckpointConfig(folder=str(folder)), *other) as checkpoints,
            pytest.raises(ValueError) as error,  # noqa: PT011  # the messages are compared by the caller
        ):
            checkpoints.resume("auto")
        said.append(str(error.value))
    return said


def test_states_of_another_rule_or_of_other_matrices_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(passed_on, 2, "muon", {"stage": 2}, None, tmp_path)
    rule, matrices = pool.run(refused, 2, tmp_path)[0]
    assert "take optim.rule=muon" in rule
    assert "layers.1.qkv.weight" in matrices
    assert "layers.0.qkv.weight" not in matrices
    assert "optim.muon.exclude" in matrices


def reload(rank: int, ranks: int, rule: str) -> None:
    """Into a fresh pair of the same layout by torch's state dicts, then one step of both."""
    old, old_optim = pair(rule, stage=3)
    train_net(old, old_optim, "uneven", steps=2)
    new, new_optim = pair(rule, seed=1, stage=3)
    new.model.load_state_dict(old.model.state_dict())
    new_optim.load_state_dict(copy.deepcopy(old_optim.state_dict()))
    assert unequal(snapshot(new, new_optim), snapshot(old, old_optim)) == []
    for each in ((old, old_optim), (new, new_optim)):
        train_net(*each, "uneven", steps=1, seed=1)
    assert unequal(snapshot(new, new_optim), snapshot(old, old_optim)) == []
    if rule == "shampoo":
        copies, copies_optim = pair(rule, stage=0, param="fp32")
        train_net(copies, copies_optim, "uneven", steps=1)
        with pytest.raises(ValueError, match="where another rank owned this parameter"):
            pair(rule, stage=2, param="fp32")[1].load_state_dict(copies_optim.state_dict())


@pytest.mark.full("tests/checkpoint/test_rule_states.py::test_states_go_from_layout_to_layout")
@pytest.mark.parametrize("rule", RULES)
def test_a_fresh_optimizer_continues_from_a_state_dict_to_the_bit(pool: Pool, rule: str) -> None:
    pool.run(reload, 2, rule)


def through_dcp(rank: int, ranks: int, rule: str, folder: str, seed: int, stage: int) -> dict[str, Tensor]:
    """Seed 0 trains and saves, another loads."""
    sharded, optim = pair(rule, seed=seed, stage=stage)
    if seed == 0:
        train_net(sharded, optim, "uneven", steps=2)
    model, states = get_model_state_dict(sharded.model), get_optimizer_state_dict(sharded.model, optim)
    if seed == 0:
        dcp.save({"model": model, "optim": states}, checkpoint_id=folder)  # type: ignore[attr-defined]
    else:
        dcp.load({"model": model, "optim": states}, checkpoint_id=folder)  # type: ignore[attr-defined]
        set_model_state_dict(sharded.model, model)
        set_optimizer_state_dict(sharded.model, optim, states)
    return everything(sharded, optim)


@pytest.mark.full("tests/checkpoint/test_rule_states.py::test_states_go_from_layout_to_layout")
@pytest.mark.parametrize("rule", RULES)
def test_dcp_files_load_exactly_into_another_layout(pool: Pool, tmp_path: Path, rule: str) -> None:
    held = together(pool.run(through_dcp, 3, rule, str(tmp_path), 0, 3))
    assert unequal(together(pool.run(through_dcp, 2, rule, str(tmp_path), 1, 1)), held) == []


@pytest.mark.full("tests/checkpoint/test_rule_states.py::test_states_go_from_layout_to_layout")
@pytest.mark.parametrize("rule", ["Adafactor", "muon"])
def test_a_run_of_pipeline_stages_moves_what_the_theory_says_and_goes_on_in_one(
    pool: Pool, tmp_path: Path, rule: str
) -> None:
    """Each pipeline stage has owners of its own. Both ends' gradients of the tied embedding add in another order."""
    text = write_text(tmp_path / "words.txt", words=300)
    common = [f"optim.rule={rule}", "optim.lr=1e-2", "optim.max_norm=null", "train.steps=4", "data.held_out=0"]
    common += ["train.accumulate=2", "precision=fp32", "checkpoint.every=2", "checkpoint.keep=9"]

    def losses(ranks: int, *settings: str) -> list[float]:
        run = settled(text, *common, *settings, f"launch.workers={ranks}")
        told = pool.run(train, ranks, run, tmp_path, timeout_s=300)
        assert all(each.agrees for each in told)
        return list(told[-1].losses)

    want = losses(4, "mesh.pp=2", "zero.stage=1", f"checkpoint.folder={tmp_path}/two")
    resume = f"resume={tmp_path}/two/step_00000002"
    found = losses(2, "zero.stage=0", f"checkpoint.folder={tmp_path}/one", resume)
    assert found == pytest.approx(want[2:], rel=1e-6)  # two roundings of fp32 in a sum, within two steps
