"""States that owners keep whole survive checkpoints to the bit, at other stages, numbers of ranks and other owners."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from parity_cells import whole
from plain_classes import Lamb, Shampoo
from pool import Pool
from small_runs import settled, train, write_text
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from training_loops import params_of, sharded_net, snapshot, unequal
from training_loops import train as train_net

from dzero import CheckpointConfig, Checkpointer, OffloadConfig, Sharded, TorchOptimizer
from dzero.plan.run_layout import workers_of

HOST = OffloadConfig(grad="host", master="host", moments="host")


def pair(seed: int = 0, **kind: Any) -> tuple[Sharded, TorchOptimizer]:
    """Another seed gives other values, which loading has to replace."""
    sharded = sharded_net("uneven", seed=seed, **{"param": "bf16", **kind})
    return sharded, TorchOptimizer(sharded, Shampoo, elementwise=False, lr=0.02)


def everything(sharded: Sharded, optim: TorchOptimizer) -> dict[str, torch.Tensor]:
    """Whole parameters and masters on every rank, and the states of the parameters that this rank owns."""
    found = params_of(sharded)
    for name, param in sharded.named_params().items():
        states = optim.state.get(param, {})
        found |= {f"{name} {key}": whole(value).clone() for key, value in states.items() if key == "master"}
        found |= {f"{name} {key}": value.clone() for key, value in states.items() if key != "master"}
    return found


def passed_on(
    rank: int, ranks: int, kind: dict[str, Any], source: Path | None, target: Path, steps: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What was loaded, and what was saved anew after `steps` more."""
    sharded, optim = pair(seed=0 if source is None else 1, **kind)
    if source is not None:
        with Checkpointer(CheckpointConfig(folder=str(source)), sharded, optim) as checkpoints:
            assert checkpoints.resume("auto") is not None
    loaded = everything(sharded, optim)
    train_net(sharded, optim, "uneven", steps=steps, seed=2)
    with Checkpointer(CheckpointConfig(folder=str(target)), sharded, optim) as checkpoints:
        checkpoints.save(optim.param_groups[0]["updates"], {})
        checkpoints.finish()
    return loaded, everything(sharded, optim)


class Listing(torch.optim.SGD):
    """A class that keeps states in a list."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            self.state[param]["both"] = [torch.zeros(1), torch.zeros(1)]


def numbers(rank: int, ranks: int, folder: Path) -> tuple[set[Any], str]:
    """Counts of a class that keeps them as Python numbers, once resumed; and what is said of lists."""
    for seed in range(2):
        sharded = sharded_net("uneven", stage=2, seed=seed)
        optim = TorchOptimizer(sharded, Lamb, elementwise=False, lr=0.02)
        with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
            if seed == 0:
                train_net(sharded, optim, "uneven", steps=3)
                checkpoints.save(3, {})
                checkpoints.finish()
            else:
                assert checkpoints.resume("auto") is not None
    counts = {states["step"] for states in optim.state.values() if "step" in states}
    sharded = sharded_net("uneven", stage=2)
    optim = TorchOptimizer(sharded, Listing, elementwise=False, lr=0.02)
    train_net(sharded, optim, "uneven", steps=1)
    with pytest.raises(TypeError) as error:
        optim.scalars()
    return counts, str(error.value)


def test_numbers_of_a_class_are_saved_and_other_objects_refused(pool: Pool, tmp_path: Path) -> None:
    counts, told = pool.run(numbers, 2, tmp_path)[0]
    assert [type(each) for each in counts] == [int]
    assert counts == {3}
    assert told.startswith("Listing keeps the state 'both' as list")


def merged(of_ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: value for of_rank in of_ranks for key, value in of_rank.items()}


def test_states_go_from_two_owners_to_the_host_of_one_and_back(pool: Pool, tmp_path: Path) -> None:
    """Each load and what one more step makes of it arrive to the bit; some states are no larger than a number."""
    kinds = [{"stage": 3}, {"stage": 2, "offload": HOST}, {"stage": 0}, {"stage": 1}]
    source, held = None, dict[str, torch.Tensor]()
    for number, (kind, ranks) in enumerate(zip(kinds, (2, 1, 2, 2), strict=True)):
        runs = pool.run(passed_on, ranks, kind, source, tmp_path / str(number), 2)
        if source is not None:
            assert unequal(merged([loaded for loaded, _ in runs]), held) == []
        source, held = tmp_path / str(number), merged([then for _, then in runs])
    assert held["layers.0.qkv.weight left"].shape[0] == held["layers.0.qkv.weight"].shape[0]
    assert float(held["layers.0.qkv.weight step"]) == 8


def reload(rank: int, ranks: int) -> None:
    """Into a fresh pair of the same owners by torch's state dicts, then one step of both; into others, refused."""
    for helpers, kind in (
        (False, {"stage": 3}),
        (True, {"stage": 1, "offload": HOST}),
        (True, {"stage": 0, "param": "fp32"}),
    ):
        old, old_optim = pair(**kind)
        train_net(old, old_optim, "uneven", steps=2)
        new, new_optim = pair(seed=1, **kind)
        new.model.load_state_dict(old.model.state_dict())
        if helpers:
            packed = get_optimizer_state_dict(old.model, old_optim)
            set_optimizer_state_dict(new.model, new_optim, copy.deepcopy(packed))
        else:
            new_optim.load_state_dict(copy.deepcopy(old_optim.state_dict()))
        for each in ((old, old_optim), (new, new_optim)):
            train_net(*each, "uneven", steps=1, seed=1)
        assert unequal(snapshot(new, new_optim), snapshot(old, old_optim)) == []
    everywhere = new_optim.state_dict()
    with pytest.raises(ValueError, match="where another rank owned this parameter"):
        pair(stage=2, param="fp32")[1].load_state_dict(everywhere)


def test_state_dicts_hold_the_states_of_this_ranks_own_parameters(pool: Pool) -> None:
    pool.run(reload, 2)


def through_dcp(rank: int, ranks: int, folder: str, seed: int, kind: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Seed 0 trains and saves, another loads."""
    sharded, optim = pair(seed=seed, **kind)
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


def test_dcp_files_load_into_other_owners(pool: Pool, tmp_path: Path) -> None:
    held = merged(pool.run(through_dcp, 4, str(tmp_path), 0, {"stage": 3}))
    assert unequal(merged(pool.run(through_dcp, 2, str(tmp_path), 1, {"stage": 1})), held) == []


@pytest.mark.parametrize("rule", ["Adafactor", "muon"])
def test_a_run_of_pipeline_stages_goes_on_in_one(pool: Pool, tmp_path: Path, rule: str) -> None:
    """Each pipeline stage has owners of its own. Both ends' gradients of the tied embedding add in another order."""
    text = write_text(tmp_path / "words.txt", words=300)
    common = [f"optim.rule={rule}", "optim.lr=1e-2", "optim.max_norm=null", "train.steps=4", "data.held_out=0"]
    common += ["train.accumulate=2", "precision=fp32", "checkpoint.every=2", "checkpoint.keep=9"]

    def losses(*settings: str) -> list[float]:
        run = settled(text, *common, *settings)
        told = pool.run(train, workers_of(run), run, tmp_path, timeout_s=300)
        assert all(each.agrees for each in told)
        return list(told[-1].losses)

    want = losses("mesh.pp=2", "launch.workers=4", "zero.stage=1", f"checkpoint.folder={tmp_path}/two")
    resume = f"resume={tmp_path}/two/step_00000002"
    assert losses("launch.workers=2", "zero.stage=0", f"checkpoint.folder={tmp_path}/one", resume) == pytest.approx(
        want[2:], rel=1e-6
    )
