"""State dicts that were saved with `torch.save` load on the rank that saved them, and on no other."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

import dzero

OPTIMIZERS: dict[str, Callable[[dzero.Sharded], Any]] = {
    "AdamW": dzero.AdamW,
    "SGD": lambda sharded: dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=0.1, momentum=0.9),
}


def told_of_the_first_ranks_file(rank: int, ranks: int, offload: str, rule: str) -> list[str]:
    """Load model and optimizer from this rank's file, then from the first one's; return what the latter raise."""
    sharded = dzero.shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), stage=3, offload=offload)
    optim = OPTIMIZERS[rule](sharded)
    sharded.model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    optim.step()
    file = io.BytesIO()
    torch.save([sharded.model.state_dict(), optim.state_dict()], file)
    files = [b""] * ranks
    dist.all_gather_object(files, file.getvalue())
    told = []
    for content in (files[rank], files[0]):
        saved = torch.load(io.BytesIO(content), weights_only=False)
        for into, states in zip((sharded.model, optim), saved, strict=True):
            try:
                into.load_state_dict(states)
            except ValueError as error:
                told.append(str(error))
    return told


@pytest.mark.parametrize(
    ("offload", "rule"), [("none", "AdamW"), ("host_all", "AdamW"), ("none", "SGD"), ("host_all", "SGD")]
)
def test_shards_of_another_rank_are_refused(pool: Pool, offload: str, rule: str) -> None:
    first, second = pool.run(told_of_the_first_ranks_file, 2, offload, rule)
    assert first == []
    assert len(second) == 2
    assert all("of the rank at [0] along the sharded axes, where this rank is at [1]" in each for each in second)
