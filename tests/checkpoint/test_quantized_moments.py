"""8-bit moments out of a checkpoint: the very codes where blocks align with those saved, near them elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kinds import Kind
from pool import Pool
from torch import Tensor
from training_loops import train

from dzero import AdamW, CheckpointConfig, Checkpointer, Sharded
from dzero.optim.quantized_moments import BLOCK_ELEMS, decode

SIGNED = {"exp_avg": True, "exp_avg_sq": False}
Stored = dict[str, tuple[int, Tensor, Tensor]]
"""By moment and parameter: where this rank's shard begins in the flat whole, its codes, its scales."""


def stored(sharded: Sharded, optim: AdamW) -> Stored:
    found: dict[str, Tensor] = {}

    def keep(name: str, key: str, tensor: Tensor) -> None:
        found[f"{key} {name}"] = tensor.clone()

    for unit in sharded.units:
        optim.export_state(unit, keep)
    return {
        f"{key} {states.name}": (
            states.first,
            found[f"{key}_codes {states.name}"],
            found[f"{key}_scale {states.name}"],
        )
        for states in optim._stored.values()
        for key in SIGNED
    }


def saved(rank: int, ranks: int, kind: Kind, folder: Path) -> Stored:
    sharded, optim = kind.make(folder)
    train(sharded, optim, kind.net, steps=3)
    with Checkpointer(CheckpointConfig(folder=str(folder / "shelf")), sharded, optim) as checkpoints:
        checkpoints.save(3, {})
        checkpoints.finish()
    return stored(sharded, optim)


def loaded(rank: int, ranks: int, kind: Kind, folder: Path) -> Stored:
    sharded, optim = kind.make(folder)
    with Checkpointer(CheckpointConfig(folder=str(folder / "shelf")), sharded, optim) as checkpoints:
        checkpoints.resume("auto")
    return stored(sharded, optim)


def tolerance(key: str) -> float:
    """The farthest that a value in [-1, 1] (or [0, 1]) lies from the table, and the rounding of the comparison: of the
    block's largest magnitude, 0.0071 for exp_avg."""
    table = decode(torch.arange(256, dtype=torch.uint8), torch.ones(1), signed=SIGNED[key]).sort().values
    gaps = table.diff().max() / 2
    ends = torch.tensor([1.0 - table[-1], table[0] + 1.0 if SIGNED[key] else table[0]])
    return float(torch.maximum(gaps, ends.max())) + 1e-6


def compare(want: list[Stored], got: list[Stored]) -> tuple[int, int]:
    """Blocks that are as stored, and others, which must be near."""
    exact = near = 0
    for name in want[0]:
        key = name.split()[0]
        shards = sorted((each[name] for each in want), key=lambda shard: shard[0])
        whole = torch.cat([decode(codes, scale, signed=SIGNED[key]) for _, codes, scale in shards])
        edges = {first: (codes, scale) for first, codes, scale in shards if codes.numel()}
        for first, codes, scale in (each[name] for each in got):
            values = decode(codes, scale, signed=SIGNED[key])
            for begin in range(0, codes.numel(), BLOCK_ELEMS):
                end = min(begin + BLOCK_ELEMS, codes.numel())
                start = max((edge for edge in edges if edge <= first + begin), default=-1)
                source = edges[start][0] if start >= 0 else torch.empty(0)
                at = first + begin - start
                last_of_both = end == codes.numel() and at + end - begin == source.numel()
                aligned = at % BLOCK_ELEMS == 0 and (end - begin == BLOCK_ELEMS or last_of_both)
                aligned &= at + end - begin <= source.numel()
                there = whole[first + begin : first + end]
                if aligned:
                    exact += 1
                    assert torch.equal(codes[begin:end], source[at : at + end - begin]), (name, first, begin)
                    assert torch.equal(values[begin:end], there)
                else:
                    near += 1
                    assert float((values[begin:end] - there).abs().max()) <= tolerance(key) * float(there.abs().max())
    return exact, near


@pytest.mark.parametrize("net", ["even", "uneven"])
def test_blocks_that_align_are_the_same_and_others_near(pool: Pool, tmp_path: Path, net: str) -> None:
    def kind(ranks: int, stage: int = 3, tier: str = "device") -> Kind:
        return Kind(stage=stage, tier=tier, ranks=ranks, net=net, moments="int8")

    want = pool.run(saved, 2, kind(2), tmp_path)
    exact, near = compare(want, pool.run(loaded, 2, kind(2, tier="disk"), tmp_path))
    assert (exact > 50, near) == (True, 0)
    for ranks in (1, 3, 4):
        exact, near = compare(want, pool.run(loaded, ranks, kind(ranks, tier="host"), tmp_path))
        assert near > 0
        assert exact > (100 if net == "even" and ranks != 3 else 0)


def test_they_load_into_other_dtypes_and_from_them(pool: Pool, tmp_path: Path) -> None:
    """Into fp32 what the codes stand for; out of it the nearest codes."""
    pool.run(saved, 2, Kind(stage=2, tier="device", ranks=2, net="even", moments="int8"), tmp_path)
    for moments, ranks in (("fp32", 1), ("bf16", 3)):
        pool.run(resumed, ranks, Kind(stage=2, tier="device", ranks=ranks, net="even", moments=moments), tmp_path)


def resumed(rank: int, ranks: int, kind: Kind, folder: Path) -> None:
    sharded, optim = kind.make(folder)
    with Checkpointer(CheckpointConfig(folder=str(folder / "shelf")), sharded, optim) as checkpoints:
        assert checkpoints.resume("auto") is not None
    moments = {states.name: states.flat("exp_avg") for states in optim._stored.values()}
    assert moments["layers.0.up.weight"].any()
    train(sharded, optim, kind.net, steps=1)
