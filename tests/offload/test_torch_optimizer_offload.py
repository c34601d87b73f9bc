"""Any element-wise class of torch.optim updates its masters on the host, with the bits it has on the device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from pool import Pool
from training_loops import params_of, sharded_net, snapshot, train, unequal

from dzero import OffloadConfig, TorchOptimizer

RULES: dict[str, dict[str, Any]] = {"SGD": {"lr": 0.05, "momentum": 0.9}, "NAdam": {"lr": 1e-3}}
HOST = [
    OffloadConfig(grad="host", master="host", moments="host"),
    OffloadConfig(master="host", moments="host", overlap="step"),
    OffloadConfig(grad="host"),
    OffloadConfig(grad="host", master="host", moments="host", master_fraction=0.5, moments_fraction=0.5),
]


def run(name: str, stage: int, microbatches: int, param: str, offload: OffloadConfig | None) -> dict[str, Any]:
    sharded = sharded_net("uneven", stage=stage, microbatches=microbatches, offload=offload, param=param)
    optim = TorchOptimizer(sharded, getattr(torch.optim, name), max_norm=0.5, **RULES[name])
    losses = train(sharded, optim, "uneven", steps=4)
    packed = optim.state_dict()
    kept = {key: value for key, value in snapshot(sharded, optim).items() if not key.endswith(".master")}
    optim.load_state_dict(packed)
    optim.offload.executor.close()
    return {"losses": torch.tensor(losses), **params_of(sharded), **{f"state {k}": v for k, v in kept.items()}}


PRODUCT = list(itertools.product(RULES, ("bf16", "fp32"), range(len(HOST))))
HALF = [cell for cell in PRODUCT if (cell[:2] in (("SGD", "bf16"), ("NAdam", "fp32"))) == (cell[2] % 2 == 0)]
"""In which every pair of a class, a dtype and a stage occurs."""


def compare(rank: int, ranks: int, cells: list[tuple[str, str, int]]) -> list[str]:
    wrong = []
    for name, param, stage in cells:
        got, want = (run(name, stage, 1 + 3 * (stage % 2), param, where) for where in (HOST[stage], None))
        wrong += [f"{name} {param} stage {stage}: {key}" for key in unequal(got, want)]
    return wrong


def test_a_class_of_torch_gives_the_same_bits_on_the_host(pool: Pool) -> None:
    assert pool.run(compare, 2, HALF) == [[], []]


@pytest.mark.slow
def test_a_class_of_torch_gives_the_same_bits_on_the_host_full_product(pool: Pool) -> None:
    assert pool.run(compare, 2, PRODUCT) == [[], []]


def loaded_alone(rank: int, ranks: int) -> list[str]:
    """Load a trained optimizer's states into one whose model keeps other values; go on, on host and device."""
    ends = []
    for offload in (None, HOST[0]):
        donor = sharded_net("even", stage=2, param="bf16", offload=offload)
        packed_of = TorchOptimizer(donor, torch.optim.SGD, **RULES["SGD"])
        train(donor, packed_of, "even", steps=3)
        fresh = sharded_net("even", stage=2, param="bf16", offload=offload)
        optim = TorchOptimizer(fresh, torch.optim.SGD, **RULES["SGD"])
        optim.load_state_dict(packed_of.state_dict())
        train(fresh, optim, "even", steps=2)
        optim.synchronize()
        ends.append(params_of(fresh))
        optim.offload.executor.close()
        packed_of.offload.executor.close()
    return unequal(*ends)


def test_states_that_are_loaded_without_the_model_follow_its_values_on_every_tier(pool: Pool) -> None:
    assert pool.run(loaded_alone, 2) == [[], []]


def refused(rank: int, ranks: int) -> None:
    sharded = sharded_net("even", offload=OffloadConfig(master="host"))
    says = r"it keeps its states where the masters are, in one fraction; take offload\.moments=host, or"
    with pytest.raises(ValueError, match=says):
        TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)


def test_states_of_a_class_stay_with_its_masters(pool: Pool) -> None:
    pool.run(refused, 1)
