"""What a newcomer types first works, or is answered in one line that says what to type instead."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from typed_commands import typed

import dzero

ALONE = """
import torch, dzero
sharded = dzero.shard(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)), stage=3, precision="fp32")
optim = dzero.AdamW(sharded)
sharded.model(torch.ones(2, 4)).sum().backward()
optim.step()
again = dzero.shard(torch.nn.Linear(4, 4))
print("trained", optim.last_decision.finite)
"""


def test_one_process_without_a_launcher_trains_and_is_told_once(tmp_path: Path) -> None:
    done = typed("-c", ALONE, cwd=tmp_path)
    assert done.stdout == "trained True\n"
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("this process trains alone") == 1


def test_one_of_several_processes_does_not_train_alone(tmp_path: Path) -> None:
    done = typed("-c", ALONE, cwd=tmp_path, env={"WORLD_SIZE": "2", "RANK": "0"})
    assert done.returncode == 1
    assert (
        "WORLD_SIZE=2, so this is one of several processes: call torch.distributed.init_process_group()" in done.stderr
    )


def refused(do: Callable[[], Any]) -> str:
    with pytest.raises((TypeError, AttributeError, ValueError, RuntimeError)) as error:
        do()
    return str(error.value)


@on_ranks(1)
def test_what_is_given_in_place_of_the_handle_is_named_with_what_to_give(
    rank: int, ranks: int, tmp_path: Path
) -> list[str]:
    model, net = nn.Linear(4, 4), partial(nn.Linear, 2, 2)
    params = list(model.parameters())
    sharded = dzero.shard(model, stage=2)
    plain = torch.optim.SGD(params)
    folder = str(tmp_path / "saved")
    config: Any = dzero.CheckpointConfig(folder=folder)
    other: Any = model
    rule: Any = "SGD"
    other_rule: Any = plain
    ways: dict[str, Callable[[], Any]] = {
        "AdamW of Linear": lambda: dzero.AdamW(other),
        "AdamW of generator": lambda: dzero.AdamW(other.parameters()),
        "AdamW of list": lambda: dzero.AdamW(params),  # type: ignore[arg-type]
        "Muon of Linear": lambda: dzero.Muon(other),
        "TorchOptimizer of Linear": lambda: dzero.TorchOptimizer(other, torch.optim.SGD),
        "TorchOptimizer of rule='SGD'": lambda: dzero.TorchOptimizer(sharded, rule),
        "TorchOptimizer of rule=an object of SGD": lambda: dzero.TorchOptimizer(sharded, other_rule),
        "name the rate, lr=0.001": lambda: dzero.AdamW(sharded, 1e-3),  # type: ignore[arg-type]
        "give parameters, AdamW(sharded, model.parameters(), ...)": lambda: dzero.AdamW(sharded, other),
        "lr='1e-3': pass a number": lambda: dzero.AdamW(sharded, lr="1e-3"),  # type: ignore[arg-type]
        "betas='no': pass two numbers": lambda: dzero.AdamW(sharded, betas="no"),  # type: ignore[arg-type]
        **{
            f"max_norm={norm!r}: must be a number above 0": partial(dzero.AdamW, sharded, max_norm=norm)
            for norm in (0.0, -1.0, float("nan"), "1", True)
        },
        **{
            f"microbatches={count!r}: must be a whole number": partial(dzero.shard, net(), microbatches=count)
            for count in (0, -1, 2.5, "2", True)
        },
        "stage='3': pass 0, 1, 2, 3, or a dzero.ZeroConfig": lambda: dzero.shard(net(), stage="3"),  # type: ignore[arg-type]
        "precision='bf15': choose one of": lambda: dzero.shard(net(), precision="bf15"),
        "offload=3: choose one of": lambda: dzero.shard(net(), offload=3),  # type: ignore[arg-type]
        "init=5: pass a function": lambda: dzero.shard(net(), init=5),  # type: ignore[arg-type]
        "model=int: pass an nn.Module": lambda: dzero.shard(5),  # type: ignore[arg-type]
        "ReLU has no floating-point parameters": lambda: dzero.shard(nn.ReLU()),
        "dzero.empty_init": lambda: dzero.shard(nn.Linear(2, 2, device="meta")),
        "zero.units=['Block']": lambda: dzero.shard(net(), dzero.ZeroConfig(units=["Block"])),
        "sharded.named_params()": lambda: dzero.AdamW(sharded, [nn.Parameter(torch.zeros(2))]),
        "microbatch(is_last=True)": lambda: dzero.AdamW(dzero.shard(net(), microbatches=2)).step(),
        "('replicate', 'shard')": lambda: dzero.shard(net(), mesh=init_device_mesh("cpu", (1,))),
        "replicate=3": lambda: dzero.make_mesh("cpu", replicate=3),
        "a mesh: 2: pass a DeviceMesh": lambda: dzero.shard(net(), mesh=2),  # type: ignore[arg-type]
        "take_mesh of None: pass a DeviceMesh": lambda: dzero.take_mesh(None, {}),  # type: ignore[arg-type]
        "make_mesh(2): the first argument is the type of device": lambda: dzero.make_mesh(2),  # type: ignore[arg-type]
        "describe of list: give a model": lambda: dzero.describe([]),  # type: ignore[arg-type]
        "Checkpointer(config, sharded, optim)": lambda: dzero.Checkpointer(config, other, dzero.AdamW(sharded)),
        "dzero.save_pretrained of Linear": lambda: dzero.save_pretrained(other, folder),
        "dzero.weights of Linear": lambda: dzero.weights(other),
        "Checkpointer of '": lambda: dzero.Checkpointer(other and folder, sharded, dzero.AdamW(sharded)),  # type: ignore[arg-type]
        "Checkpointer of Linear": lambda: dzero.Checkpointer(config, other, dzero.AdamW(sharded)),
        "Checkpointer with SGD": lambda: dzero.Checkpointer(config, sharded, plain),  # type: ignore[arg-type]
        "call sharded.model(...)": lambda: sharded(torch.ones(4)),
        "sharded.model.parameters": lambda: sharded.parameters(),
        "'Sharded' has no attribute 'modle'": lambda: sharded.modle,
    }
    messages = {told: refused(do) for told, do in ways.items()}
    return [f"{told}: {said}" for told, said in messages.items() if told not in said or "\n" in said]
