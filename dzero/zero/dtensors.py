"""Conversion between DTensors and the local tensors of this rank."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, distribute_tensor

from dzero.utils.torch_internals import local_tensor_of, schema_of, tree_leaves


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local shard of a DTensor without recording gradients, or any other tensor itself.

    Where no gradients are recorded, this equals `to_local` in a tenth of the time. Of a watched tensor, it returns the
    plain one.
    """
    local = local_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor
    return local if type(local) is torch.Tensor else getattr(local, "plain", local)


def placed_like(
    local: torch.Tensor,
    like: torch.Tensor,
    mesh: DeviceMesh | None = None,
    placements: tuple[Placement, ...] | None = None,
) -> DTensor:
    """Return a DTensor with the local tensor `local`, placed like another one.

    Args:
        local: Local tensor, of any dtype, with as many elements as the local shard of `like` unless placed otherwise.
        like: DTensor that determines the global shape, the mesh and the placements.
        mesh: Other mesh to use, such as the host's.
        placements: Other placements to use.
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


def part_of(tensor: torch.Tensor, like: DTensor) -> torch.Tensor:
    """Return this rank's part of a plain tensor that has the whole shape of `like`; any other tensor itself."""
    if tensor.shape != like.shape or tensor.shape == local_of(like).shape:
        return tensor
    return local_of(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None))


def refuse_other_ranks_shard(name: str, saved: torch.Tensor, own: torch.Tensor) -> None:
    """Raise ValueError if `saved`, loaded from a file, is the shard that another rank has of what `own` is a shard of.

    A DTensor in a file keeps the place of the rank that wrote it. Shards of two ranks may have the same shape.
    """
    theirs, ours = _place_of(saved), _place_of(own)
    if theirs is not None and ours is not None and theirs != ours:
        raise ValueError(
            f"{name}: a shard of the rank at {theirs} along the sharded axes, where this rank is at {ours}. A file "
            "that one rank wrote (accelerate's save_state, torch.save) has that rank's shards only: save with "
            "dzero.Checkpointer or DCP"
        )


def _place_of(tensor: torch.Tensor) -> list[int] | None:
    """Return the rank's coordinates along the axes of the mesh that cut a DTensor; None for other tensors."""
    if not isinstance(tensor, DTensor) or (place := tensor.device_mesh.get_coordinate()) is None:
        return None
    axes = zip(place, tensor.placements, tensor.device_mesh.shape, strict=True)
    return [at for at, placement, ranks in axes if placement.is_shard() and ranks > 1]


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the operator `func` writes into, according to its schema."""
    arguments = schema_of(func).arguments
    by_name = {**dict(zip((each.name for each in arguments), args, strict=False)), **kwargs}
    into = [by_name.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(into) if isinstance(leaf, torch.Tensor)]
