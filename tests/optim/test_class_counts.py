"""What a class counts in its groups or in attributes, such as its steps, counts steps of training, on every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_classes
import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, train, unequal

from dzero import CheckpointConfig, Checkpointer, OffloadConfig
from dzero.offload.executor import OffloadError
from dzero.optim.torch_optimizer import TorchOptimizer
from dzero.zero.offload_config import DiskConfig


class Counting(torch.optim.Optimizer):
    """Its rate falls with the number of its steps, which it keeps in each group, as a tensor, and as an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls = 0
        super().__init__(params, {"lr": lr, "step": 0, "decay": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            group["decay"] *= 0.75
            group["late"] = group.get("late", 0) + 1
            rate = group["lr"] * float(group["decay"]) / (group["step"] + group["late"] + self.calls)
            for param in (param for param in group["params"] if param.grad is not None):
                param.sub_(param.grad, alpha=rate)


class Norming(torch.optim.SGD):
    """Keeps the norm of the gradients of all parameters, and so mixes them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["norm"] = float(sum(p.grad.norm() for p in group["params"] if p.grad is not None))
        super().step()


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "device": ({"stage": 2}, {}),
    "grads alone": ({"stage": 2}, {"grad": "host"}),
    "host": ({"stage": 3}, {"grad": "host", "master": "host", "moments": "host"}),
    "disk": ({"stage": 1}, {"grad": "host", "master": "disk", "moments": "disk"}),
}


def offload_of(kinds: dict[str, Any], path: str) -> OffloadConfig | None:
    disk = {"disk": DiskConfig(paths=[path])} if "disk" in kinds.values() else {}
    return OffloadConfig(**kinds, **disk) if kinds else None


def counted(rank: int, ranks: int, path: str, elementwise: bool) -> dict[str, Any]:
    found = {}
    for name, (net, kinds) in WAYS.items():
        sharded = sharded_net("uneven", param="fp32", offload=offload_of(kinds, path), **net)
        optim = TorchOptimizer(sharded, Counting, lr=0.5, max_norm=0.5, elementwise=elementwise)
        train(sharded, optim, "uneven", steps=3)
        optim.synchronize()
        (group,) = optim.param_groups
        numbers = group["step"], float(group["decay"]), group["late"], optim.inner.calls
        found[name] = {"params": params_of(sharded), "numbers": numbers}
        optim.offload.executor.close()
    return found


@pytest.mark.parametrize("elementwise", [True, False])
def test_a_class_counts_steps_of_training(pool: Pool, tmp_path: Path, elementwise: bool) -> None:
    plain = plain_classes.train(Counting, {"lr": 0.5}, precision="fp32", steps=3, clip=0.5)
    for found in pool.run(counted, 2, str(tmp_path), elementwise):
        for name, each in found.items():
            assert each["numbers"] == (3, 0.75**3, 3, 3), name
            for key, want in plain.items():
                torch.testing.assert_close(each["params"][key], want, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


def resumed(rank: int, ranks: int, path: str, way: str) -> list[str]:
    net, kinds = WAYS[way]
    ends = []
    for stop in (False, True):
        sharded = sharded_net("uneven", offload=offload_of(kinds, path), **net)
        optim = TorchOptimizer(sharded, Counting, lr=0.5, elementwise=True)
        train(sharded, optim, "uneven", steps=2)
        if stop:
            with Checkpointer(CheckpointConfig(folder=f"{path}/saved"), sharded, optim) as checkpoints:
                checkpoints.save(2, {})
                checkpoints.finish()
                train(sharded, optim, "uneven", steps=3)  # counts that the checkpoint must take back
                checkpoints.resume("auto")
            optim.inner.calls = 2  # an attribute is in no state dict of torch either
        train(sharded, optim, "uneven", steps=2, seed=1)
        optim.synchronize()
        ends.append({**params_of(sharded), "step": torch.tensor(optim.param_groups[0]["step"])})
        optim.offload.executor.close()
    return unequal(*ends)


def test_a_checkpoint_has_the_counts_of_a_class(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed, 2, str(tmp_path), "host") == [[], []]


def refused(rank: int, ranks: int) -> list[str]:
    messages = []
    for kinds in ({"grad": "host"}, {"grad": "host", "master": "host", "moments": "host"}):
        sharded = sharded_net("even", stage=0, offload=OffloadConfig(**kinds))
        with pytest.raises(ValueError, match="updated at other times") as error:
            TorchOptimizer(sharded, Norming, lr=0.1)
        messages.append(str(error.value))
    sharded = sharded_net("even", stage=2, offload=OffloadConfig(**kinds))
    optim = TorchOptimizer(sharded, Norming, lr=0.1, elementwise=True)
    with pytest.raises(OffloadError, match="it mixes parameters") as failed:
        train(sharded, optim, steps=1)
    return [*messages, str(failed.value)]


def test_a_class_that_mixes_parameters_is_refused_off_the_device(pool: Pool) -> None:
    grad, master, run = pool.run(refused, 2)[0]
    assert "take offload.grad=device" in grad
    assert "elementwise=True" in master
    assert "norm=" in run
