"""A process group whose ranks do not exist but one, for what only shapes are asked of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from dzero.estimate.torch_internals import FakeStore, forget_meshes


@contextmanager
def fake_group(ranks: int, rank: int = 0) -> Iterator[None]:
    """This process is `rank` of `ranks`; collectives move nothing. Raises RuntimeError in one that is in a group."""
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
        forget_meshes()  # type: ignore[no-untyped-call]  # DTensor remembers how operators place results, and the mesh that they were on
