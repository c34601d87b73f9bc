"""One cell of the parity product: train 12 steps on a small net, here and in the oracle, and compare.

factor     values
stage      0, 1, 2, 3
precision  fp32, bf16, fp16
M          1, 4 microbatches
master     fp32, remainder (bf16 only)
net        even, uneven, tied, frozen (tests/support/small_decoders.py)
ranks      2, 4
"""

from __future__ import annotations

import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pairwise
import recorded
import reference
import small_decoders
import torch
from pool import Pool
from recorded import DTYPES as DTYPES
from torch import nn
from training_loops import joined_master, states_of, step, whole
from training_loops import master_of as master_of

from dzero import OffloadConfig

STEPS = 12
SCALE = {"init": 2.0**21, "growth_interval": 4, "hysteresis": 2}
"""So high that the first steps of fp16 overflow, and growing within the run."""


@dataclass(frozen=True)
class Cell:
    stage: int
    precision: str
    microbatches: int
    master: str
    net: str
    ranks: int
    compute: str = "param"

    @property
    def is_allowed(self) -> bool:
        return self.master == "fp32" or self.precision == "bf16"


FACTORS = {
    "stage": (0, 1, 2, 3),
    "precision": ("fp32", "bf16", "fp16"),
    "microbatches": (1, 4),
    "master": ("fp32", "remainder"),
    "net": ("even", "uneven", "tied", "frozen"),
    "ranks": (2, 4),
}


def full_product() -> list[Cell]:
    """Every combination that the table allows."""
    return [cell for cell in itertools.starmap(Cell, itertools.product(*FACTORS.values())) if cell.is_allowed]


def pairwise_cover() -> list[Cell]:
    """Few cells in which every allowed pair of values of two factors occurs."""

    def cost(row: pairwise.Row) -> float:
        return float(row["ranks"] * row["microbatches"])

    return [Cell(**row) for row in pairwise.cover(FACTORS, lambda row: Cell(**row).is_allowed, cost=cost)]


def pairs(cell: Cell) -> set[pairwise.Pair]:
    return pairwise.pairs({name: getattr(cell, name) for name in FACTORS})


def run_of(cell: Cell, delay_after: int | None = None) -> recorded.Run:
    precision = {"param": cell.precision, "master": cell.master, "compute": cell.compute}
    late = {} if delay_after is None else {"overlap": "delayed", "delay_warmup_steps": delay_after}
    run = recorded.Run(cell.stage, cell.net, cell.ranks, microbatches=cell.microbatches, steps=STEPS, scale=SCALE)
    return replace(run, precision=precision, offload=late)


def train(rank: int, ranks: int, cell: Cell, offload: OffloadConfig | None = None) -> dict[str, Any] | None:
    """The worker's side: `STEPS` steps of the library; rank 0 returns what the oracle returns."""
    run = run_of(cell)
    sharded, optim = recorded.made(run, offload=offload)
    steps = [step(sharded, optim, of_step[rank]) for of_step in recorded.batches_of(run)]
    optim.synchronize()
    states = {n: {k: whole(v) for k, v in each.items()} for n, each in states_of(sharded, optim).items()}
    trained = {name: each for name, each in states.items() if len(each) > 1}
    result = {
        "norms": [norm for _, norm, _ in steps],
        "scales": [scale for _, _, scale in steps],
        "params": {name: each["value"] for name, each in states.items()},
        "moments": {name: (each["exp_avg"], each["exp_avg_sq"]) for name, each in trained.items()},
        "masters": {name: joined_master(each) for name, each in trained.items()},
    }
    return result if rank == 0 else None


def train_beside_oracles(
    pool: Pool, cell: Cell, offload: OffloadConfig | None = None, *, delays: tuple[int | None, ...] = (None,)
) -> tuple[dict[str, Any], list[reference.History]]:
    """What rank 0 returns, and the oracle's run for each delay, made by this process while the workers train."""
    with ThreadPoolExecutor(1) as beside:
        oracles = [beside.submit(oracle, cell, delay) for delay in delays]
        result: dict[str, Any] = pool.run(train, cell.ranks, cell, offload)[0]
    return result, [each.result() for each in oracles]


def oracle(cell: Cell, delay_after: int | None = None) -> reference.History:
    """The same run by reference.py; cells that differ in nothing that it knows of share one."""
    is_early = cell.stage >= 2 and cell.microbatches > 1
    return _oracle(replace(cell, stage=2 if is_early else 0, master="fp32"), delay_after)


@functools.cache
def _oracle(cell: Cell, delay_after: int | None) -> reference.History:
    run = run_of(cell, delay_after)
    return recorded.oracle(run, lambda: in_plain_torchao(small_decoders.build(cell.net), cell.compute))


def in_plain_torchao(model: nn.Module, compute: str) -> nn.Module:
    """The model with the linear layers of its blocks replaced by torchao's, where `compute` asks for it."""
    if compute == "param":
        return model
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(compute.removeprefix("fp8_"))
    return convert_to_float8_training(
        model,
        config=replace(config, emulate=True),
        module_filter_fn=lambda layer, name: name.startswith("layers."),
    )


def differences(got: dict[str, Any], want: reference.History) -> list[str]:
    """Every way in which a run is not bit-equal to the oracle's."""
    norms = [None if skipped else norm for norm, skipped in zip(want.norms, want.skipped, strict=True)]
    told = {"norms": (got["norms"], norms), "scales": (got["scales"], want.scales)}
    found = [f"{key}: {ours} against {theirs}" for key, (ours, theirs) in told.items() if ours != theirs]
    for key in ("params", "masters", "moments"):
        expected = getattr(want, key)
        if got[key].keys() != expected.keys():
            found.append(f"{key}: {sorted(got[key])} against {sorted(expected)}")
            continue
        for name, tensor in expected.items():
            ours = got[key][name]
            for a, b in zip(ours, tensor, strict=True) if isinstance(tensor, tuple) else [(ours, tensor)]:
                if a.dtype != b.dtype or not torch.equal(a, b):
                    off = (a.float() - b.float()).abs().max().item()
                    found.append(f"{key} {name}: {(a != b).sum()} of {a.numel()} differ, by up to {off:.3g}")
    return found


def same_numbers(a: list[float], b: list[float]) -> bool:
    """Equal, or both not finite."""
    return len(a) == len(b) and all(x == y or (x - x != 0 and y - y != 0) for x, y in zip(a, b, strict=True))


def together(of_ranks: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """What all ranks have; those that have the same have the same bits of it."""
    found: dict[str, torch.Tensor] = {}
    for of_rank in of_ranks:
        for name, value in of_rank.items():
            assert name not in found or torch.equal(found[name], value), f"{name}: ranks differ"
            found[name] = value
    return found
