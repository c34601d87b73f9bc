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

import reference
import small_decoders
import torch
from pool import Pool
from recorded import whole
from torch import nn

from dzero import AdamW, OffloadConfig, PrecisionConfig, ScalerConfig, ZeroConfig, shard

STEPS, LR, CLIP = 12, 3e-3, 0.5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# fp16 starts so high that the first steps overflow, and grows within the run.
SCALE = {"init": 2.0**21, "growth_interval": 4, "hysteresis": 2}


@dataclass(frozen=True)
class Cell:
    stage: int
    precision: str
    microbatches: int
    master: str
    net: str
    ranks: int
    compute: str = "param"


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
    cells = itertools.starmap(Cell, itertools.product(*FACTORS.values()))
    return [cell for cell in cells if cell.master == "fp32" or cell.precision == "bf16"]


def pairwise_cover() -> list[Cell]:
    """Few cells in which every allowed pair of values of two factors occurs (greedy, deterministic)."""
    product = full_product()
    missing = set().union(*(pairs(cell) for cell in product))
    cover = []
    while missing:
        best = max(product, key=lambda cell: (len(pairs(cell) & missing), -cell.ranks * cell.microbatches))
        cover.append(best)
        missing -= pairs(best)
    return cover


def pairs(cell: Cell) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    values = [(name, getattr(cell, name)) for name in FACTORS]
    return set(itertools.combinations(values, 2))


def train(rank: int, ranks: int, cell: Cell, offload: OffloadConfig | None = None) -> dict[str, Any] | None:
    """The worker's side: `STEPS` steps of the library; rank 0 returns what the oracle returns."""
    sharded = shard(
        small_decoders.build(cell.net),
        ZeroConfig(stage=cell.stage),
        precision=PrecisionConfig(param=cell.precision, master=cell.master, compute=cell.compute),
        offload=offload,
        microbatches=cell.microbatches,
    )
    optim = AdamW(sharded, lr=LR, max_norm=CLIP, scaler=ScalerConfig(**SCALE))
    norms, scales, skipped = [], [], []
    for of_step in small_decoders.batches(cell.net, steps=STEPS, ranks=ranks, microbatches=cell.microbatches):
        for index, batch in enumerate(of_step[rank]):
            with sharded.microbatch(is_last=index == cell.microbatches - 1):
                loss = small_decoders.loss_fn(sharded.model, batch) / cell.microbatches
                optim.scale_loss(loss).backward()
        scales.append(optim.scaler.scale)
        optim.step()
        norms.append(optim.last_decision.norm)
        skipped.append(not optim.last_decision.finite)
    optim.synchronize()
    states = {name: optim.state.get(p, {}) for name, p in sharded.named_params().items()}
    result = {
        "norms": norms,
        "scales": scales,
        "skipped": skipped,
        "params": {name: whole(p) for name, p in sharded.named_params().items()},
        "moments": {n: (whole(s["exp_avg"]), whole(s["exp_avg_sq"])) for n, s in states.items() if s},
        "masters": {n: master_of(sharded.named_params()[n], s) for n, s in states.items() if s},
    }
    return result if rank == 0 else None


def master_of(param: torch.Tensor, state: dict[str, torch.Tensor]) -> torch.Tensor:
    """The fp32 master of a parameter, put together by integer arithmetic of its own for the remainder."""
    if "master" in state:
        return whole(state["master"])
    if "remainder" not in state:
        return whole(param)
    high = whole(param).view(torch.int16).long() * 65536
    bits = (high + whole(state["remainder"]).long()) & 0xFFFFFFFF
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def train_beside_oracles(
    pool: Pool, cell: Cell, offload: OffloadConfig | None = None, *, delays: tuple[int | None, ...] = (None,)
) -> tuple[dict[str, Any], list[reference.History]]:
    """What rank 0 returns, and the oracle's run for each delay, made by this process while the workers train."""
    with ThreadPoolExecutor(1) as beside:
        oracles = [beside.submit(oracle, cell, delay) for delay in delays]
        result: dict[str, Any] = pool.run(train, cell.ranks, cell, offload)[0]
    return result, [each.result() for each in oracles]


def oracle(cell: Cell, delay_after: int | None = None) -> reference.History:
    """The same run by tests/support/reference.py."""
    early = cell.stage >= 2 and cell.microbatches > 1
    return _oracle(cell.precision, cell.microbatches, cell.net, cell.ranks, early, delay_after, cell.compute)


@functools.cache
def _oracle(
    precision: str, microbatches: int, net: str, ranks: int, early: bool, delay_after: int | None, compute: str
) -> reference.History:
    """Cells that differ in nothing that the oracle knows of share its run."""
    working = DTYPES[precision]
    return reference.train(
        lambda: in_plain_torchao(small_decoders.build(net), compute),
        small_decoders.batches(net, steps=STEPS, ranks=ranks, microbatches=microbatches),
        small_decoders.loss_fn,
        lrs=[LR] * STEPS,
        numerics=reference.Numerics(
            working=working,
            wire=working,
            grad=torch.float32 if microbatches > 1 else working,
            early=early,
        ),
        clip=CLIP,
        loss_scale=reference.LossScale(**SCALE) if precision == "fp16" else None,
        sum_squares=reference.sum_squares_in_lanes,
        delay_after=delay_after,
    )


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
    found = [
        f"{key}: {got[key]} against {getattr(want, key)}"
        for key in ("norms", "scales", "skipped")
        if not same_numbers(got[key], getattr(want, key))
    ]
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
