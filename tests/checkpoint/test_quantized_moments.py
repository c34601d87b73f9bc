"""8-bit moments out of a checkpoint: the very codes where blocks align with those saved, near them elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool
from torch import Tensor
from training_loops import sharded_net, train

from dzero import AdamW, CheckpointConfig, Checkpointer

BLOCK_ELEMS = 256
MOST_GAP = {"exp_avg": 0.0071, "exp_avg_sq": 0.0036}
"""The farthest that a value in [-1, 1], or [0, 1], lies from the table of 256 values (Dettmers et al. 2022), with the
rounding of the comparison."""


def passed_on(
    rank: int, ranks: int, net: str, kind: dict[str, Any], source: Path | None, target: Path | None
) -> dict[str, Tensor]:
    """Load from `source`, or train; save in `target`. Moments of this rank, codes and scales or values, by name."""
    sharded = sharded_net(net, stage=kind.get("stage", 3), moments=kind["moments"], seed=source is not None)
    optim = AdamW(sharded, lr=3e-3)
    if source is None:
        train(sharded, optim, net, steps=3)
    else:
        with Checkpointer(CheckpointConfig(folder=str(source)), sharded, optim) as checkpoints:
            assert checkpoints.resume("auto") is not None
    if target is not None:
        with Checkpointer(CheckpointConfig(folder=str(target)), sharded, optim) as checkpoints:
            checkpoints.save(3, {})
    found = {
        f"{key} {name}": whole(value).clone()
        for name, param in sharded.named_params().items()
        for key, value in optim.state[param].items()
        if key.startswith("exp_avg")
    }
    train(sharded, optim, net, steps=1)  # what was loaded is trained on
    return found


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("net", ["uneven", "even"])
def test_blocks_that_align_are_the_same_and_others_near(pool: Pool, tmp_path: Path, net: str) -> None:
    """Of the values for which codes stand, which loading into fp32 on one rank gives.

    A value that is encoded anew moves by at most a part of its block's largest magnitude. That block lies within the
    `BLOCK_ELEMS` before and behind it. With even shards on 1 and 4 ranks, some blocks align with those of 2 ranks.
    """
    int8, fp32 = {"moments": "int8"}, {"moments": "fp32"}
    codes = pool.run(passed_on, 2, net, int8, None, tmp_path / "2")[0]
    (want,) = pool.run(passed_on, 1, net, fp32, tmp_path / "2", None)
    same = pool.run(passed_on, 2, net, {**int8, "stage": 2}, tmp_path / "2", None)[0]
    assert codes.keys() == same.keys()
    assert all(torch.equal(value, same[name]) for name, value in codes.items())
    assert codes["exp_avg_codes layers.0.up.weight"].unique().numel() > 1
    for ranks in (1, 3) if net == "even" else (3,):
        pool.run(passed_on, ranks, net, int8, tmp_path / "2", tmp_path / str(ranks))
        (found,) = pool.run(passed_on, 1, net, fp32, tmp_path / str(ranks), None)
        moved = 0
        for name, value in want.items():
            flat, got = value.flatten(), found[name].flatten()
            window = torch.nn.functional.max_pool1d(
                flat.abs()[None], 2 * BLOCK_ELEMS + 1, stride=1, padding=BLOCK_ELEMS
            )[0]
            assert ((flat - got).abs() <= MOST_GAP[name.split()[0]] * window).all(), name
            moved += int((flat != got).sum())
        total = sum(value.numel() for value in want.values())
        assert 0 < moved < total // (1 if net == "uneven" or ranks == 3 else 4)


@pytest.mark.full("tests/checkpoint/test_quantized_moments.py::test_blocks_that_align_are_the_same_and_others_near")
def test_they_load_into_bf16_and_out_of_it(pool: Pool, tmp_path: Path) -> None:
    """On other ranks; the nearest of each, with 8 bits of bf16 beside the table's gap."""
    pool.run(passed_on, 2, "even", {"moments": "int8"}, None, tmp_path / "2")
    (want,) = pool.run(passed_on, 1, "even", {"moments": "fp32"}, tmp_path / "2", None)
    found = pool.run(passed_on, 3, "even", {"moments": "bf16"}, tmp_path / "2", tmp_path / "3")[0]
    assert all(torch.equal(found[name], value.bfloat16()) for name, value in want.items())
    pool.run(passed_on, 2, "even", {"moments": "int8"}, tmp_path / "3", tmp_path / "again")
    (again,) = pool.run(passed_on, 1, "even", {"moments": "fp32"}, tmp_path / "again", None)
    for name, value in want.items():
        most = float(value.abs().max())
        assert float((again[name] - value).abs().max()) <= (MOST_GAP[name.split()[0]] + 2**-8) * most
