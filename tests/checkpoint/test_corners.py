"""What a loop of one's own may do with checkpoints, and train.py never does."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist
from pool import Pool
from torch import nn
from training_loops import params_of, sharded_net, train, unequal

from dzero import AdamW, ZeroConfig, make_mesh, shard
from dzero.checkpoint.checkpointer import Checkpointer
from dzero.checkpoint.config import CheckpointConfig


def resumed_beside_saves(rank: int, ranks: int, folder: Path) -> list[int | None]:
    """The steps that are found, by ranks of which one is late."""
    sharded = sharded_net(stage=3)
    optim = AdamW(sharded)
    train(sharded, optim, steps=1)
    found = []
    with Checkpointer(CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        for step in range(1, 6):
            checkpoints.save(step, {})
            time.sleep(0.1 * rank)
            resumed = checkpoints.resume("auto")
            found.append(None if resumed is None else resumed.step)
    return found


def test_resume_waits_for_a_save_that_is_under_way(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed_beside_saves, 2, tmp_path / "checkpoints") == [[1, 2, 3, 4, 5]] * 2


def resumed_with_nothing(rank: int, ranks: int, folder: Path) -> list[str]:
    """Rows that are too few for all ranks; names of parameters that did not come back."""

    def make(seed: int) -> tuple[dict[str, torch.Tensor], Checkpointer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 1))
        sharded = shard(model, ZeroConfig(stage=3), mesh=make_mesh("cpu"))
        made = Checkpointer(CheckpointConfig(folder=str(folder)), sharded, AdamW(sharded))
        if seed:
            made.resume("auto")
        return params_of(sharded), made

    before, first = make(0)
    with first:
        first.save(0, {})
        first.finish()
    after, second = make(1)
    with second:
        dist.barrier()
    return unequal(before, after)


def test_a_rank_without_any_element_resumes(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(resumed_with_nothing, 2, tmp_path / "checkpoints") == [[], []]
