"""Cells of the product of everything that offload can vary, and what comparing one with the device takes."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import offload_lanes
import small_decoders
import torch
from pool import Pool
from training_loops import params_of, sharded_net, snapshot, train, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, ScalerConfig, Sharded, testing

KINDS = ("param", "grad", "master", "moments")
TIERS = ("device", "host", "disk")
STEPS = 14
POISONED_STEP = 6
SPIKES = (2, 10, 11)  # steps with gradients 30 times as large, which max_norm clips


Cell = SimpleNamespace
"""A value of each of `FACTORS`."""
FACTORS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(KINDS, TIERS[::-1]),
    "fraction": (1.0, 0.5),
    "overlap": ("forward", "step", "backward"),
    "undo_bytes": (1 << 30, 30_000),
    "stage": (0, 1, 2, 3),
    "microbatches": (1, 4),
    "max_norm": (8.0, None),
    "precision": ("bf16", "fp32", "fp16"),
    "states": ("fp32", "remainder", "bf16", "int8"),
    "net": ("uneven", "even", "tied", "frozen"),
    "ranks": (2, 1, 4),
    "replicate": (1, 2),
}


def allowed(row: dict[str, Any]) -> bool:
    tiers = [row[kind] for kind in KINDS]
    return (
        set(tiers) != {"device"}
        and (row["overlap"] == "forward" or row["master"] != "device")
        and (row["overlap"] != "backward" or "device" not in tiers[1:])
        and (row["param"] == "device" or (row["stage"] == 3 and row["master"] != "device"))
        and (row["overlap"] == "backward" or row["undo_bytes"] == 1 << 30)
        and (row["states"] != "remainder" or row["precision"] == "bf16")
        and (row["states"] != "int8" or row["master"] == row["moments"])
        and (row["overlap"] != "backward" or row["master"] != "disk" or row["precision"] != "fp32")
        and (row["replicate"] == 1 or (row["ranks"] == 4 and row["stage"] > 0))
    )


def cost(row: dict[str, Any]) -> float:
    """How a cell's seconds grow, below proportion: else the cover has more cells, and takes longer again."""
    return float(row["ranks"] * row["microbatches"] ** 0.8) ** 0.3


STRESSED = {
    **dict.fromkeys(KINDS, "host"),
    "param": "device",
    "fraction": 1.0,
    "undo_bytes": 1 << 30,
    "max_norm": 8.0,
    "states": "fp32",
    "net": "uneven",
    "replicate": 1,
}


def offload_of(cell: Cell, paths: Sequence[Path] = ()) -> OffloadConfig:
    tiers: dict[str, Any] = {kind: getattr(cell, kind) for kind in KINDS}
    fractions = {f"{kind}_fraction": cell.fraction for kind in KINDS if tiers[kind] != "device"}
    overlap = "auto" if cell.overlap == "forward" else cell.overlap
    return on_disk(OffloadConfig(**tiers, **fractions, overlap=overlap, undo_bytes=cell.undo_bytes), paths)


def on_disk(offload: OffloadConfig, paths: Sequence[Path]) -> OffloadConfig:
    if "disk" not in (getattr(offload, kind) for kind in KINDS):
        return offload
    weights = [1.0, 2.0][: len(paths)]
    disk = DiskConfig(paths=[str(path) for path in paths], weights=weights, block_bytes=8192)
    return replace(offload, prefetch_units=1 + len(paths) % 2, disk=disk)


def run(
    cell: Cell, rank: int, offload: OffloadConfig | None, steps: int, before: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Train; on one step the last rank's gradients are not finite. before: called before every action."""
    precision = {"param": cell.precision} | (
        {"master": "remainder"} if cell.states == "remainder" else {"moments": cell.states}
    )
    sharded = sharded_net(
        cell.net,
        stage=cell.stage,
        microbatches=cell.microbatches,
        replicate=cell.replicate,
        offload=offload,
        **precision,
    )
    optim = AdamW(sharded, lr=3e-3, max_norm=cell.max_norm, scaler=ScalerConfig(init=2.0**20, growth_interval=4))
    offload_lanes.before(optim, before)
    norms, losses, clipped = [], [], 0
    batches = small_decoders.batches(cell.net, steps=steps, ranks=cell.ranks, microbatches=cell.microbatches)
    for step, of_step in enumerate(batches):
        poison = float("inf") if step == POISONED_STEP and rank == cell.ranks - 1 else 30.0 if step in SPIKES else 1.0
        for index, batch in enumerate(of_step[rank]):
            with sharded.microbatch(is_last=index == cell.microbatches - 1):
                loss = small_decoders.loss_fn(sharded.model, batch) / cell.microbatches
                (optim.scale_loss(loss) * poison).backward()
            losses.append(loss.item())
        for group in optim.param_groups:
            group["lr"] = 3e-3 / (1 + step // 2)  # an update with the old one, made ahead, is undone
        scale = optim.scaler.scale
        optim.step()
        assert optim.last_decision is not None
        norms.append(optim.last_decision.norm)
        clipped += optim.last_decision.factor * scale < 1.0
    assert cell.max_norm is None or cell.precision == "fp16" or clipped == sum(step < steps for step in SPIKES)
    optim.synchronize()
    kept, params = snapshot(sharded, optim), params_of(sharded)
    assert offload_lanes.host_bytes(optim) == testing.bytes_on_tiers(optim)["host"]
    assert (offload_lanes.host_bytes(optim) > 0) == (offload is not None)
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "norms": torch.tensor(norms, dtype=torch.float64).nan_to_num(-1.0),
        "skips": torch.tensor(optim.skipped_steps),
        **params,
        **{f"state {key}": value for key, value in kept.items()},
    }


def compare(
    rank: int, ranks: int, cell: Cell, paths: Sequence[Path] = (), seed: int | None = None
) -> tuple[list[str], int]:
    """Keys that differ; skipped steps. paths: of the disk. seed: of random delays before every action."""
    chance = random.Random(None if seed is None else 1000 * seed + rank)

    def delay(action: str) -> None:
        time.sleep(chance.choice([0.0, 0.0, 0.0, 0.001, 0.01]))

    steps = STEPS if seed is None else POISONED_STEP + 2
    want = run(cell, rank, None, steps)
    got = run(cell, rank, offload_of(cell, paths), steps, None if seed is None else delay)
    # An fp32 parameter is its own master on the device, and has a separate one elsewhere.
    extra = {key for key in got.keys() - want.keys() if key.endswith(".master") and cell.precision == "fp32"}
    same = [key for key in extra if torch.equal(got[key].view(-1), got[key.removesuffix(".master")].view(-1))]
    assert len(same) == len(extra)
    return unequal({k: v for k, v in got.items() if k not in extra}, want), int(got["skips"])


def name(row: dict[str, Any]) -> str:
    tiers = "".join(row[kind][:2] for kind in KINDS)
    return (
        f"{tiers}{row['fraction']}-{row['overlap']}-stage{row['stage']}-M{row['microbatches']}-clip{row['max_norm']}-"
        f"{row['precision']}-{row['states']}-{row['net']}-{row['ranks']}of{row['replicate']}"
    )


def family(tier: str, stage: int, microbatches: int, max_norm: float | None, ranks: int) -> list[Cell]:
    """Cells that share their run on the device: every set of kinds on `tier`, the others there, and all overlaps."""
    shared = {"stage": stage, "microbatches": microbatches, "max_norm": max_norm, "precision": "bf16", "ranks": ranks}
    tiers = itertools.product((tier, "device"), repeat=len(KINDS))
    overlaps = ("forward", "step", "backward")
    rows = [
        {**STRESSED, **shared, "overlap": overlap, **dict(zip(KINDS, each, strict=True))}
        for each, overlap in itertools.product(tiers, overlaps)
    ]
    return [Cell(**row) for row in rows if allowed(row)]


def compare_family(rank: int, ranks: int, cells: list[Cell], paths: Sequence[Path] = ()) -> dict[str, list[str]]:
    """Keys that differ, by cell."""
    want = run(cells[0], rank, None, STEPS)
    return {name(vars(cell)): unequal(run(cell, rank, offload_of(cell, paths), STEPS), want) for cell in cells}


def everything(path: Path | str, **changes: Any) -> OffloadConfig:
    """Every state on disk, but for `changes`; units of few blocks."""
    disk = DiskConfig(paths=[str(path)], block_bytes=8192)
    return OffloadConfig(disk=disk, **(dict.fromkeys(KINDS, "disk") | changes))


def end_of(sharded: Sharded, optim: AdamW, steps: int = 0) -> dict[str, torch.Tensor]:
    """Parameters and states after so many more steps."""
    train(sharded, optim, steps=steps)
    optim.synchronize()
    return {**snapshot(sharded, optim), **{f"whole {name}": value for name, value in params_of(sharded).items()}}


def has_the_bits_of_the_device(pool: Pool, run: Any, ranks: int, offload: OffloadConfig, *args: Any) -> None:
    """Hold what `run(rank, ranks, offload, *args)` gives on each rank against what it gives without offload."""
    want = pool.run(run, ranks, None, *args)
    for ours, theirs in zip(pool.run(run, ranks, offload, *args), want, strict=True):
        assert unequal(ours, theirs) == []
