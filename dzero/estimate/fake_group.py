"""Process group with a single real rank, for code that only needs shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache as forget_meshes
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process `rank` of a fake group whose collectives move nothing; RuntimeError if it is in a group."""
    if dist.is_initialized():
        raise RuntimeError(
            "a simulation makes a process group of its own, and this process is in one: simulate before "
            "init_process_group, or in a process of its own"
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()  # type: ignore[no-untyped-call]  # DTensor's sharding cache refers to the meshes of this group
