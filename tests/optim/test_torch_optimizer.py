"""Any element-wise class of torch.optim over the fp32 masters; those that mix parameters only where nothing is cut.

What a class counts in its groups or in attributes, such as its steps, counts steps of training, on every tier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import plain_classes
import pytest
import torch
from on_ranks import on_ranks
from pool import Pool
from training_loops import params_of, sharded_net, train, unequal

from dzero import CheckpointConfig, Checkpointer, DiskConfig, OffloadConfig, OffloadError, TorchOptimizer

RULES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
}
STEPS = 2


Cell = tuple[str, str, int]
CELLS: list[Cell] = [*zip(RULES, ("fp32", "bf16", "fp32", "bf16"), (1, 3, 3, 0), strict=True)]
CELLS += [("SGD", "bf16", 3), ("SGD", "bf16", 0)]  # of which the bits are compared


def run_all(rank: int, ranks: int) -> dict[Cell, dict[str, Any]]:
    found = {}
    for name, precision, stage in CELLS:
        sharded = sharded_net("uneven", stage=stage, param=precision)
        optim = TorchOptimizer(sharded, getattr(torch.optim, name), max_norm=0.5, **RULES[name])
        losses = train(sharded, optim, "uneven", steps=STEPS)
        assert len(optim.state_dict()["state"]) == len(sharded.named_params())
        run = {"losses": losses, "params": params_of(sharded), "bytes": optim.state_bytes()}
        found[name, precision, stage] = run
    return found


Runs = dict[Cell, dict[str, Any]]


@pytest.fixture(scope="module")
def runs(pool: Pool) -> Runs:
    result: Runs = pool.run(run_all, 2)[0]
    return result


def test_the_rules_follow_torch_on_one_process(runs: Runs) -> None:
    """Equal here to the bit; vector bodies and tails of torch's kernels may round apart on another CPU, hence a
    tolerance: fp32 1e-5, bf16 one place (2^-7 relative)."""
    for (name, precision, stage), result in runs.items():
        rtol = 1e-5 if precision == "fp32" else 2.0**-7
        plain = plain_classes.train(getattr(torch.optim, name), RULES[name], precision=precision, steps=STEPS, clip=0.5)
        for key, want in plain.items():
            got = result["params"][key]
            torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5, msg=f"{name} {precision} stage {stage}: {key}")


def test_sgd_is_the_same_at_stage_0_and_3_to_the_bit(runs: Runs) -> None:
    assert runs["SGD", "bf16", 0]["losses"] == runs["SGD", "bf16", 3]["losses"]
    assert unequal(runs["SGD", "bf16", 0]["params"], runs["SGD", "bf16", 3]["params"]) == []


def test_bytes_of_a_rules_states_are_counted(runs: Runs) -> None:
    whole = runs["SGD", "bf16", 0]["bytes"]
    elems = whole["param"] // 2
    assert whole == {"param": 2 * elems, "master": 4 * elems, "moments": 4 * elems}
    assert runs["SGD", "fp32", 1]["bytes"]["master"] == 0


class Unknown(torch.optim.SGD):
    """A class of which nothing is known."""


@on_ranks(2)
def test_rules_that_may_mix_parameters_are_refused_on_shards(rank: int, ranks: int) -> None:
    for stage, rule in ((3, torch.optim.LBFGS), (1, Unknown)):
        sharded = sharded_net("even", stage=stage)
        with pytest.raises(ValueError, match="silently wrong") as error:
            TorchOptimizer(sharded, rule, lr=0.1)
        for words in (rule.__name__, f"zero.stage={stage}", "elementwise=False if every parameter by itself"):
            assert words in str(error.value)
    precisions: tuple[dict[str, Any], ...] = ({"master": "remainder"}, {"moments": "bf16"})
    for precision in precisions:
        with pytest.raises(ValueError, match=r"take precision\.(master|moments)=fp32"):
            TorchOptimizer(sharded_net("even", **precision), torch.optim.SGD)


def begun(rank: int, ranks: int) -> float:
    """What a tiny step leaves of values loaded before the optimizer was made, of which an option was refused once."""
    sharded = sharded_net("even")
    half = {name: value * 0.5 for name, value in sharded.model.state_dict().items()}
    sharded.model.load_state_dict(half)
    with pytest.raises(TypeError, match="momentumm"):
        TorchOptimizer(sharded, torch.optim.SGD, momentumm=0.9)
    train(sharded, TorchOptimizer(sharded, torch.optim.SGD, lr=1e-9), "even", steps=1)
    after = sharded.model.state_dict()
    return max(float((after[name] - half[name]).full_tensor().abs().max()) for name in half)


def test_loaded_values_are_masters_and_a_refused_option_costs_none(pool: Pool) -> None:
    """bf16 has 8 bits: a master of the values before would be off by half of them."""
    assert max(pool.run(begun, 2)) < 1e-6


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


def offload_of(kinds: dict[str, Any], path: Path) -> OffloadConfig | None:
    disk = {"disk": DiskConfig(paths=[str(path)])} if "disk" in kinds.values() else {}
    return OffloadConfig(**kinds, **disk) if kinds else None


def counted(rank: int, ranks: int, path: Path, elementwise: bool) -> dict[str, Any]:
    found = {}
    for name, (net, kinds) in WAYS.items():
        sharded = sharded_net("uneven", param="fp32", offload=offload_of(kinds, path), **net)
        optim = TorchOptimizer(sharded, Counting, lr=0.5, max_norm=0.5, elementwise=elementwise)
        train(sharded, optim, "uneven", steps=2)
        optim.synchronize()
        (group,) = optim.param_groups
        numbers = group["step"], float(group["decay"]), group["late"], optim.inner.calls
        found[name] = {"params": params_of(sharded), "numbers": numbers}
    return found


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("elementwise", [True, False])
def test_a_class_counts_steps_of_training(pool: Pool, tmp_path: Path, elementwise: bool) -> None:
    plain = plain_classes.train(Counting, {"lr": 0.5}, precision="fp32", steps=2, clip=0.5)
    for found in pool.run(counted, 2, tmp_path, elementwise):
        for name, each in found.items():
            assert each["numbers"] == (2, 0.75**2, 2, 2), name
            for key, want in plain.items():
                torch.testing.assert_close(each["params"][key], want, rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


@on_ranks(2)
def test_a_checkpoint_has_the_counts_of_a_class(rank: int, ranks: int, tmp_path: Path) -> list[str]:
    net, kinds = WAYS["host"]
    ends = []
    for stop in (False, True):
        sharded = sharded_net("uneven", offload=offload_of(kinds, tmp_path), **net)
        optim = TorchOptimizer(sharded, Counting, lr=0.5, elementwise=True)
        train(sharded, optim, "uneven", steps=2)
        if stop:
            with Checkpointer(CheckpointConfig(folder=f"{tmp_path}/saved"), sharded, optim) as checkpoints:
                checkpoints.save(2, {})
                checkpoints.finish()
                train(sharded, optim, "uneven", steps=3)  # counts that the checkpoint must take back
                checkpoints.resume("auto")
            optim.inner.calls = optim.inner.late = 2  # an attribute is in no state dict of torch either
        train(sharded, optim, "uneven", steps=2, seed=1)
        optim.synchronize()
        ends.append({**params_of(sharded), "step": torch.tensor(optim.param_groups[0]["step"])})
    return unequal(*ends)


@on_ranks(2)
def test_counts_stay_with_their_group_when_another_is_taken_away(rank: int, ranks: int, tmp_path: Path) -> list[str]:
    """A group is taken away while the update of its parameters, which counts in it, may still run."""
    ends = []
    for kinds in ({}, WAYS["disk"][1]):
        sharded = sharded_net("uneven", stage=2, param="fp32", offload=offload_of(kinds, tmp_path))
        first, *rest = sharded.named_params().values()
        optim = TorchOptimizer(sharded, Counting, [{"params": [first]}, {"params": rest}], lr=0.5, elementwise=True)
        train(sharded, optim, "uneven", steps=2)
        optim.param_groups.pop(0)
        train(sharded, optim, "uneven", steps=2)
        optim.synchronize()
        (group,) = optim.param_groups
        assert (group["step"], float(group["decay"])) == (4, 0.75**4)
        ends.append(params_of(sharded))
    return unequal(*ends)


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
    for _ in range(3):
        for name, param in sharded.named_params().items():  # one parameter has one owner
            param.grad = torch.zeros_like(param) if name == "head.weight" else None
        optim.step()
    rate = torch.tensor(0.25)
    on_host = sharded_net("even", offload=offload_of(WAYS["host"][1], Path()))
    halving = TorchOptimizer(on_host, Halving, lr=rate, elementwise=True)
    tried = float(rate)
    train(on_host, halving, steps=2)
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


@on_ranks(1)
def test_a_state_that_checkpoints_cannot_hold_is_told_when_they_are_saved(
    rank: int, ranks: int, tmp_path: Path
) -> None:
    sharded = sharded_net("even", stage=2)
    optim = TorchOptimizer(sharded, Shaped, lr=0.1, elementwise=True)
    train(sharded, optim, steps=1)
    with (
        Checkpointer(CheckpointConfig(folder=str(tmp_path)), sharded, optim) as checkpoints,
        pytest.raises(TypeError, match=r"Shaped keeps the state 'two' of shape \(2,\)"),
    ):
        checkpoints.save(1, {})


@on_ranks(2)
def test_a_class_that_mixes_parameters_is_refused_off_the_device(rank: int, ranks: int) -> None:
    host = {"grad": "host", "master": "host", "moments": "host"}
    for kinds, advice in (({"grad": "host"}, "take offload.grad=device"), (host, "elementwise=True")):
        sharded = sharded_net("even", stage=0, offload=OffloadConfig(**kinds))
        with pytest.raises(ValueError, match="updated at other times") as refused:
            TorchOptimizer(sharded, Norming, lr=0.1)
        assert advice in str(refused.value)
    sharded = sharded_net("even", stage=2, offload=OffloadConfig(**host))
    optim = TorchOptimizer(sharded, Norming, lr=0.1, elementwise=True)
    train(sharded, optim, steps=1)
    with pytest.raises(OffloadError, match="it mixes parameters") as failed:
        optim.synchronize()
    assert "norm=" in str(failed.value)
