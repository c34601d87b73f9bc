"""One rank of many in this process: collectives move nothing, so that what a rank sends and keeps can be counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor import debug
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_ranks(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process `rank` of a group that does not exist. What it gathers is whatever memory held."""
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        debug._clear_sharding_prop_cache()  # which would find meshes of this group when the next one has equal ones
