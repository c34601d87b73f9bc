"""Between a DTensor and what this rank has of it."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local shard, without a graph; any other tensor itself."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def placed_like(local: torch.Tensor, like: torch.Tensor, mesh: DeviceMesh | None = None) -> DTensor:
    """`local` [like's local shard, any dtype] as a DTensor placed as `like` is. mesh: its own, e.g. the host's."""
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        local.view(local_of(like).shape),
        mesh or like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
