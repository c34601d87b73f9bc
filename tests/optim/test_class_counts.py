"""What a class counts in its groups or in attributes, such as its steps, counts steps of training, on every tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_classes
import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, train, unequal

from dzero import CheckpointConfig, Checkpointer, DiskConfig, OffloadConfig, OffloadError, TorchOptimizer


class Counting(torch.optim.Optimizer):
    """Its rate falls with the number of its steps, which it keeps in each group, as a tensor, and as an attribute."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.calls = 0
        super().__init__(params, {"lr": lr, "step": 0, "decay": torch.tensor(1.0), "nothing": float("nan")})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        self.late = getattr(self, "late", 0) + 1
        assert self.late == self.calls
        for group in self.param_groups:
            group["nothing"] *= 2
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
            optim.inner.calls = optim.inner.late = 2  # an attribute is in no state dict of torch either
        train(sharded, optim, "uneven", steps=2, seed=1)
        optim.synchronize()
        ends.append({**params_of(sharded), "step": torch.tensor(optim.param_groups[0]["step"])})
        optim.offload.executor.close()
    return unequal(*ends)


def test_a_checkpoint_has_the_counts_of_a_class(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed, 2, str(tmp_path), "host") == [[], []]


def edited(rank: int, ranks: int, where: str, path: str) -> list[str]:
    """A group is taken away while the update of its parameters, which counts in it, may still run."""
    ends = []
    for kinds in ({}, WAYS[where][1]):
        sharded = sharded_net("uneven", stage=2, param="fp32", offload=offload_of(kinds, path))
        first, *rest = sharded.named_params().values()
        optim = TorchOptimizer(sharded, Counting, [{"params": [first]}, {"params": rest}], lr=0.5, elementwise=True)
        train(sharded, optim, "uneven", steps=2)
        optim.param_groups.pop(0)
        train(sharded, optim, "uneven", steps=2)
        optim.synchronize()
        (group,) = optim.param_groups
        assert (group["step"], float(group["decay"])) == (4, 0.75**4)
        ends.append(params_of(sharded))
        optim.offload.executor.close()
    return unequal(*ends)


@pytest.mark.parametrize("where", ["host", "disk"])
def test_counts_stay_with_their_group_when_another_is_taken_away(pool: Pool, tmp_path: Path, where: str) -> None:
    assert pool.run(edited, 2, where, str(tmp_path)) == [[], []]


class Halving(torch.optim.SGD):
    """Writes into its rate, a tensor of the user's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"].mul_(0.5)
        super().step()


def owned(rank: int, ranks: int) -> dict[str, Any]:
    """A rank whose parameters have no gradients counts too; and a class is tried without a trace."""
    sharded = sharded_net("even", stage=2, param="fp32")
    optim = TorchOptimizer(sharded, Counting, lr=0.5, elementwise=False)
    assert optim._unsharded is not None
    unused = {param for name, param in sharded.named_params().items() if (name in optim._unsharded.owned) == (rank > 0)}
    for _ in range(3):
        for param in sharded.named_params().values():
            param.grad = None if param in unused else torch.zeros_like(param)
        optim.step()
    rate = torch.tensor(0.25)
    host = OffloadConfig(grad="host", master="host", moments="host")
    halving = TorchOptimizer(sharded_net("even", offload=host), Halving, lr=rate, elementwise=True)
    tried = float(rate)
    train(halving._sharded, halving, steps=2)
    halving.synchronize()
    return {"step": optim.param_groups[0]["step"], "tried": tried, "lr": float(halving.param_groups[0]["lr"])}


def test_every_rank_counts_and_trying_a_class_leaves_no_trace(pool: Pool) -> None:
    assert pool.run(owned, 2) == [{"step": 3, "tried": 0.25, "lr": 0.0625}] * 2


class Shaped(torch.optim.SGD):
    """Keeps a state of another shape than the parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in (param for group in self.param_groups for param in group["params"]):
            self.state[param]["two"] = torch.zeros(2)
        super().step()


def shaped(rank: int, ranks: int, path: str) -> str:
    sharded = sharded_net("even", stage=2)
    optim = TorchOptimizer(sharded, Shaped, lr=0.1, elementwise=True)
    train(sharded, optim, steps=1)
    with (
        Checkpointer(CheckpointConfig(folder=path), sharded, optim) as checkpoints,
        pytest.raises(TypeError, match="of shape") as error,
    ):
        checkpoints.save(1, {})
    return str(error.value)


def test_a_state_that_checkpoints_cannot_hold_is_told_when_they_are_saved(pool: Pool, tmp_path: Path) -> None:
    assert "Shaped keeps the state 'two' of shape (2,)" in pool.run(shaped, 1, str(tmp_path))[0]


def refused(rank: int, ranks: int) -> list[str]:
    messages = []
    for kinds in ({"grad": "host"}, {"grad": "host", "master": "host", "moments": "host"}):
        sharded = sharded_net("even", stage=0, offload=OffloadConfig(**kinds))
        with pytest.raises(ValueError, match="updated at other times") as error:
            TorchOptimizer(sharded, Norming, lr=0.1)
        messages.append(str(error.value))
    sharded = sharded_net("even", stage=2, offload=OffloadConfig(**kinds))
    optim = TorchOptimizer(sharded, Norming, lr=0.1, elementwise=True)
    train(sharded, optim, steps=1)
    with pytest.raises(OffloadError, match="it mixes parameters") as failed:
        optim.synchronize()
    return [*messages, str(failed.value)]


def test_a_class_that_mixes_parameters_is_refused_off_the_device(pool: Pool) -> None:
    grad, master, run = pool.run(refused, 2)[0]
    assert "take offload.grad=device" in grad
    assert "elementwise=True" in master
    assert "norm=" in run
