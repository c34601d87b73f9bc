"""Process group with a single real rank, for code that only needs shapes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dzero.utils.torch_internals import fake_store, forget_meshes


@contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """Make this process `rank` of a fake group whose collectives move nothing; RuntimeError if it is in a group."""
    if dist.is_initialized():
        raise RuntimeError(
            "a simulation makes a process group of its own, and this process is in one: simulate before "
            "init_process_group, or in a process of its own"
        )
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=fake_store())
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_meshes()  # DTensor's sharding cache refers to the meshes of this group
