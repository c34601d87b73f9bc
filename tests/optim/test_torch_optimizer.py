"""Any element-wise class of torch.optim over the fp32 masters; those that mix parameters only where nothing is cut."""

from __future__ import annotations

from typing import Any

import plain_classes
import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, snapshot, train, unequal

from dzero import TorchOptimizer

RULES: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
    "Adagrad": {"lr": 0.01},
    "RMSprop": {"lr": 1e-3},
    "NAdam": {"lr": 1e-3},
}
STEPS = 6


def run(rank: int, ranks: int, name: str, precision: str, stage: int) -> dict[str, Any]:
    sharded = sharded_net("uneven", stage=stage, param=precision)
    optim = TorchOptimizer(sharded, getattr(torch.optim, name), max_norm=0.5, **RULES[name])
    losses = train(sharded, optim, "uneven", steps=STEPS)
    kept = snapshot(sharded, optim)
    packed = optim.state_dict()["state"]
    assert len(packed) == len(sharded.named_params())
    return {"losses": losses, "params": params_of(sharded), "states": len(kept), "bytes": optim.state_bytes()}


def run_all(rank: int, ranks: int) -> dict[tuple[str, str, int], dict[str, Any]]:
    cells = [(n, p, s) for n, p, s in zip(RULES, ("fp32", "bf16", "fp32", "bf16"), (1, 3, 3, 0), strict=True)]
    cells += [("SGD", "bf16", 3), ("SGD", "bf16", 0)]
    return {cell: run(rank, ranks, *cell) for cell in cells}


@pytest.fixture(scope="module")
def runs(pool: Pool) -> dict[tuple[str, str, int], dict[str, Any]]:
    result: dict[tuple[str, str, int], dict[str, Any]] = pool.run(run_all, 2)[0]
    return result


def test_the_rules_follow_torch_on_one_process(runs: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    """Equal here to the bit; vector bodies and tails of torch's kernels may round apart on another CPU, hence a
    tolerance: fp32 1e-5, bf16 one place (2^-7 relative)."""
    for (name, precision, stage), result in runs.items():
        rtol = 1e-5 if precision == "fp32" else 2.0**-7
        plain = plain_classes.train(getattr(torch.optim, name), RULES[name], precision=precision, steps=STEPS, clip=0.5)
        for key, want in plain.items():
            got = result["params"][key]
            torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5, msg=f"{name} {precision} stage {stage}: {key}")


def test_sgd_is_the_same_at_stage_0_and_3_to_the_bit(runs: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    assert runs["SGD", "bf16", 0]["losses"] == runs["SGD", "bf16", 3]["losses"]
    assert unequal(runs["SGD", "bf16", 0]["params"], runs["SGD", "bf16", 3]["params"]) == []


def test_bytes_of_a_rules_states_are_counted(runs: dict[tuple[str, str, int], dict[str, Any]]) -> None:
    whole = runs["SGD", "bf16", 0]["bytes"]
    elems = whole["param"] // 2
    assert whole == {"param": 2 * elems, "master": 4 * elems, "moments": 4 * elems}
    assert runs["SGD", "fp32", 1]["bytes"]["master"] == 0


def loaded_before(rank: int, ranks: int) -> float:
    """Values that a model was given between shard() and the optimizer: what a tiny step leaves of them."""
    sharded = sharded_net("even")
    half = {name: value * 0.5 for name, value in sharded.model.state_dict().items()}
    sharded.model.load_state_dict(half)
    optim = TorchOptimizer(sharded, torch.optim.SGD, lr=1e-9)
    train(sharded, optim, "even", steps=1)
    after = sharded.model.state_dict()
    return max(float((after[name] - half[name]).full_tensor().abs().max()) for name in half)


def test_values_loaded_before_the_optimizer_are_its_masters(pool: Pool) -> None:
    assert max(pool.run(loaded_before, 2)) < 1e-6


def retried(rank: int, ranks: int) -> list[str]:
    """A wrong option, then the right one: the fp32 masters are still those of the model."""
    ends = []
    for wrong in (True, False):
        sharded = sharded_net("even")
        if wrong:
            with pytest.raises(TypeError, match="momentumm"):
                TorchOptimizer(sharded, torch.optim.SGD, momentumm=0.9)
        optim = TorchOptimizer(sharded, torch.optim.SGD, lr=1e-2)
        train(sharded, optim, "even", steps=2)
        ends.append(snapshot(sharded, optim))
    return unequal(*ends)


def test_a_refused_option_costs_no_masters(pool: Pool) -> None:
    assert pool.run(retried, 2) == [[], []]


class Unknown(torch.optim.SGD):
    """A class of which nothing is known."""


def refusals(rank: int, ranks: int) -> dict[str, str]:
    messages = {}
    for stage, rule in ((3, torch.optim.LBFGS), (1, Unknown)):
        sharded = sharded_net("even", stage=stage)
        with pytest.raises(ValueError, match="silently wrong") as error:
            TorchOptimizer(sharded, rule, lr=0.1)
        messages[rule.__name__] = str(error.value)
    precisions: tuple[dict[str, Any], ...] = ({"master": "remainder"}, {"moments": "bf16"})
    for precision in precisions:
        with pytest.raises(ValueError, match=r"take precision\.(master|moments)=fp32") as error:
            TorchOptimizer(sharded_net("even", **precision), torch.optim.SGD)
        messages[str(precision)] = str(error.value)
    return messages


def test_rules_that_may_mix_parameters_are_refused_on_shards(pool: Pool) -> None:
    messages = pool.run(refusals, 2)[0]
    for name, stage in (("LBFGS", 3), ("Unknown", 1)):
        assert name in messages[name]
        assert f"zero.stage={stage}" in messages[name]
        assert "elementwise=False if every parameter by itself" in messages[name]
