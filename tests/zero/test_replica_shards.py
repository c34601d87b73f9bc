"""Masters and moments over all data-parallel ranks, parameters over the shard axis: HSDP's bits with less of each."""

from __future__ import annotations

import re
from typing import Any

import pytest
import small_decoders
import torch
from fake_ranks import fake_ranks
from parity_cells import whole
from pool import Pool
from training_loops import masters_of, params_of, sharded_net, train, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, TorchOptimizer, ZeroConfig, testing

LR, CLIP = 3e-3, 0.5
OVER_ALL = ("replicate", "shard")
STATES_ON_HOST = {"grad": "host", "master": "host", "moments": "host"}
FORWARD, IN_STEP = OffloadConfig(**STATES_ON_HOST), OffloadConfig(master="host", moments="host", overlap="step")
IN_PART = OffloadConfig(**STATES_ON_HOST, master_fraction=0.5, moments_fraction=0.5, grad_fraction=0.3)
# net, stage, microbatches, offload, precision. `uneven` has short and empty shards, and parts of them.
CELLS: list[tuple[str, int, int, OffloadConfig | str, dict[str, str]]] = [
    ("uneven", 2, 1, OffloadConfig(), {"param": "bf16", "master": "remainder", "moments": "bf16"}),
    ("uneven", 3, 2, FORWARD, {"param": "bf16"}),
    ("uneven", 1, 2, OffloadConfig(), {"param": "fp32"}),
    ("uneven", 3, 1, IN_STEP, {"param": "fp32"}),
    ("frozen", 2, 2, IN_PART, {"param": "fp16"}),
    ("tied", 1, 1, "disk", {"param": "bf16", "moments": "bf16"}),
]
FEW = 1
"""Cells of the default suite; golden.json has others."""


def both(rank: int, ranks: int, folder: str, cells: int, steps: int) -> list[list[str]]:
    """What differs, cell by cell, between whole shards of states and parts of them after steps of 2 x 2 ranks."""
    told = []
    for net, stage, microbatches, offload, precision in CELLS[:cells]:
        if isinstance(offload, str):
            disk = DiskConfig(paths=[folder], block_bytes=8192)
            offload = OffloadConfig(grad="host", master=offload, moments=offload, disk=disk)
        settings = {"stage": stage, "microbatches": microbatches, "replicate": 2, "offload": offload, **precision}
        runs = []
        for axes in (("shard",), OVER_ALL):
            sharded = sharded_net(net, optimizer_shard_axes=axes, **settings)
            optim = AdamW(sharded, lr=LR, max_norm=CLIP)
            losses, norms = [], []
            for seed in range(steps):
                losses += train(sharded, optim, net, steps=1, seed=seed)
                assert optim.last_decision is not None
                norms.append(optim.last_decision.norm)
            optim.synchronize()
            run = {"losses": torch.tensor(losses), "norms": torch.tensor(norms, dtype=torch.float64)}
            run |= params_of(sharded) | {f"master {n}": p for n, p in masters_of(sharded, optim).items()}
            for name, param in sharded.named_params().items():
                of_param = optim.state.get(param, {})
                run |= {f"{key} {name}": whole(of_param[key]) for key in ("exp_avg", "exp_avg_sq") if key in of_param}
            runs.append(run)
        told.append(unequal(*runs))
    return told


def test_parts_of_states_give_the_bits_of_whole_shards_of_them(pool: Pool, tmp_path: Any) -> None:
    """Losses, norms, parameters, masters and moments: each element is averaged and updated by the same operations.

    Beside plain torch both are trained in tests/zero/test_unused.py and tests/habits/test_models_and_loops.py.
    """
    assert pool.run(both, 4, str(tmp_path), FEW, 2) == [[[]] * FEW] * 4


@pytest.mark.full("tests/zero/test_replica_shards.py::test_parts_of_states_give_the_bits_of_whole_shards_of_them")
def test_so_they_do_in_every_tier(pool: Pool, tmp_path: Any) -> None:
    assert pool.run(both, 4, str(tmp_path), len(CELLS), 3, timeout_s=400) == [[[]] * len(CELLS)] * 4


def held(rank: int, net: str, **precision: str) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the states of one of 2 x 2 ranks, and those of the formula."""
    with fake_ranks(4, rank):
        sharded = sharded_net(net, stage=3, replicate=2, optimizer_shard_axes=OVER_ALL, **precision)
        optim = AdamW(sharded)
        expected = testing.resting_bytes(sharded)
    return optim.state_bytes(), {kind: expected[kind] for kind in ("param", "master", "moments")}


def test_a_rank_keeps_its_part_of_the_states_and_its_shard_of_the_parameters() -> None:
    """bf16 over 2 x 2: 2 Ψ / 2 of parameters, 4 Ψ / 4 of masters, 8 Ψ / 4 of moments; where rows do not divide, at most
    the formula, and all ranks together exactly Ψ of each."""
    elems = sum(param.numel() for param in small_decoders.build("even").parameters())
    got, formula = held(1, "even", param="bf16")
    assert got == formula == {"param": elems, "master": elems, "moments": 2 * elems}
    elems = sum(param.numel() for param in small_decoders.build("uneven").parameters())
    ranks = [held(rank, "uneven", param="bf16", master="remainder") for rank in range(4)]
    for got, formula in ranks:
        assert all(got[kind] <= formula[kind] for kind in got)
    assert sum(got["master"] for got, _ in ranks) == 2 * elems
    assert sum(got["moments"] for got, _ in ranks) == 8 * elems


NAMED = "zero.optimizer_shard_axes=[replicate,shard]"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"replicate": 1}, "mesh.replicate=2 or more"),
        ({"stage": 0}, "zero.stage=1, 2 or 3 with mesh.replicate=2 or more"),
        ({"stage": 3, "offload": OffloadConfig(param="host", master="host")}, "offload.param=device"),
        ({"offload": OffloadConfig(**STATES_ON_HOST, overlap="backward")}, "offload.overlap=forward"),
        ({"offload": OffloadConfig(**STATES_ON_HOST, overlap="delayed")}, "offload.overlap=forward"),
    ],
    ids=str,
)
def test_what_it_does_not_go_with_is_refused_with_what_to_take(settings: dict[str, Any], told: str) -> None:
    """The command line's refusals: tests/inside/test_inside_rules.py."""
    with (
        fake_ranks(4),
        pytest.raises(ValueError, match=re.escape("zero.optimizer_shard_axes=[replicate,shard]")) as said,
    ):
        sharded_net(**({"replicate": 2, "optimizer_shard_axes": OVER_ALL} | settings))
    assert told in str(said.value)


def test_other_rules_and_other_axes_are_refused() -> None:
    with fake_ranks(4):
        sharded = sharded_net(replicate=2, optimizer_shard_axes=OVER_ALL)
        with pytest.raises(ValueError, match=re.escape(NAMED)):
            TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"choose \[shard\] or \[replicate,shard\]"):
        ZeroConfig(optimizer_shard_axes=["none"])
