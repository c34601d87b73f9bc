"""Refuses to make a Python number of a DTensor of which this rank has a part.

    p.grad.norm().item()                the norm of this rank's shard, another number on every rank
    if p.grad.isnan().any(): continue   ranks go different ways

DTensor gives the part without a word. To add the parts up here would wait for ranks that do not ask, as when rank 0
alone logs. This needs what DTensor keeps to itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_meshes: WeakSet[DeviceMesh] = WeakSet()


def refuse_partial_numbers(params: Iterable[nn.Parameter], meshes: Iterable[DeviceMesh] = ()) -> None:
    """Refuse them from now on of DTensors on the meshes of `params`, and on `meshes`."""
    _meshes.update([*meshes, *(param.device_mesh for param in params if isinstance(param, DTensor))])
    DTensor._op_dispatcher._custom_op_handlers[torch.ops.aten._local_scalar_dense.default] = _number


def _number(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    cut = [p for axis, p in enumerate(tensor.placements) if mesh.size(axis) > 1 and not p.is_replicate()]
    if cut and mesh in _meshes:
        raise RuntimeError(
            f"item(), float() or bool() of a DTensor whose ranks have different parts ({cut[0]}), as of p.grad.norm() "
            "or p.isnan().any(): call .full_tensor() of it on all ranks before; optim.last_decision has norm and finite"
        )
    return op_call(tensor._local_tensor)
