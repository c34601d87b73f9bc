"""Between a DTensor and what this rank has of it."""

from __future__ import annotations

import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's local shard, without a graph; any other tensor itself."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def placed_like(
    local: torch.Tensor,
    like: torch.Tensor,
    mesh: DeviceMesh | None = None,
    placements: tuple[Placement, ...] | None = None,
) -> DTensor:
    """`local` [rows of `like`, any dtype] as a DTensor placed as `like` is. mesh, placements: its own, e.g. the host's.

    Without placements of its own it has the rows of like's local shard.
    """
    assert isinstance(like, DTensor)
    rows, *rest = local_of(like).shape
    return DTensor.from_local(
        local.view(rows if placements is None else local.numel() // max(1, math.prod(rest)), *rest),
        mesh or like.device_mesh,
        placements or like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
