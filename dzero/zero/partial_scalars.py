"""Python numbers of DTensors that are sharded or partial, for which DTensor silently uses this rank's part.

expression                          DTensor by itself               here
if p.grad.isnan().any(): continue   ranks may branch differently    the value of the whole, as all ranks call it
p.grad.norm().item()                another number on every rank    error: often only rank 0 calls it, to log it,
and would wait for the others
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dzero.utils.torch_internals import handle_numbers, local_tensor_of

_meshes: WeakSet[DeviceMesh] = WeakSet()


def watch_numbers(meshes: Iterable[DeviceMesh]) -> None:
    """Convert DTensors on `meshes` to Python numbers in this way from now on."""
    _meshes.update(meshes)
    handle_numbers(_number)


def _number(op_call: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
    tensor = args[0]
    assert isinstance(tensor, DTensor)
    mesh = tensor.device_mesh
    cut = [p for axis, p in enumerate(tensor.placements) if mesh.size(axis) > 1 and not p.is_replicate()]
    if not cut or mesh not in _meshes:
        return op_call(local_tensor_of(tensor))
    if tensor.dtype == torch.bool:
        return tensor.full_tensor().item()
    raise RuntimeError(
        f"item() or float() of a DTensor whose ranks have different parts ({cut[0]}), as of p.grad.norm(): "
        "call .full_tensor() of it on all ranks before; optim.last_decision has the norm of all gradients"
    )
