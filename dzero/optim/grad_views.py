"""The `.grad` of sharded parameters: DTensors over their unit's reduced gradients, which report every edit.

Each trained parameter has one from the reduction of the last microbatch to the optimizer's step, as after any backward:

    gradient on     local tensor of `.grad`                   operations on it
    device          `WatchedTensor` over the reduced buffer   run on the buffer
    host, disk      `OffDeviceShard`                          wait for the gradient, and write changes back

torch's version counters miss some edits (foreach operations on DTensors do not increment them). So these tensors call
`GradUse.before_write` for each operation that writes, which invalidates norm and finiteness from the reduction.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dzero.utils.torch_internals import spec_of
from dzero.zero.dtensors import local_of, part_of
from dzero.zero.offloaded_param import OffDeviceShard, OffDeviceTensor
from dzero.zero.watched_tensor import WatchedTensor, Watcher

USED_UP = "its gradient was used up by step(), or dropped; clone what is to stay"


class GradUse(Watcher, Protocol):
    """Owner of gradients, which is notified of every use of them through `.grad`.

    Attributes:
        generation: Counter that changes when gradients are dropped, so that views of old ones can be refused.
    """

    generation: int

    def before_write(self) -> None:
        """Handle an imminent write; raise RuntimeError if an update already uses the gradients."""

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter's gradient off the device, once it has arrived; for one on disk, a copy."""

    def put(self, name: str, flat: torch.Tensor) -> None:
        """Replace the values of a gradient off the device; `flat` may be the tensor that `read` returned."""


class OffloadedGradStorage:
    """Storage (`zero.offloaded_param.TensorStorage`) of a gradient off the device, valid within its step.

    Attributes:
        use: Returns the owner of the gradient, or None if it is gone.
    """

    def __init__(self, name: str, use: weakref.ref[GradUse]) -> None:
        self._name, self.use = name, use
        self._generation = self._owner().generation

    def get(self) -> torch.Tensor:
        """Return the elements [elems] in host memory, in place or as a copy of those on disk."""
        return self._current().read(self._name)

    def put(self, flat: torch.Tensor) -> None:
        """Replace the elements by `flat` [elems], which may be the tensor that `get` returned."""
        self._current().put(self._name, flat)

    def _owner(self) -> GradUse:
        if (use := self.use()) is None:
            raise RuntimeError(f"{self._name}: its gradient is gone with the optimizer that kept it off the device")
        return use

    def _current(self) -> GradUse:
        use = self._owner()
        if use.generation != self._generation:
            raise RuntimeError(f"{self._name}: {USED_UP}")
        return use


class GradMaker:
    """Makes the `.grad` of one parameter, in the gradient dtype of the layout.

    Args:
        name: Name of the parameter.
        param: The sharded parameter.
        dtype: Dtype of the gradient.
        shape: Shape of the local gradient.
        mesh: Mesh of the gradient, which differs from the parameter's for replica shards.
        placements: Placements of the gradient on `mesh`.
    """

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        dtype: torch.dtype,
        shape: torch.Size,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
    ) -> None:
        self._name, self._shape, self._device = name, shape, param.device
        outline = torch.empty((), dtype=dtype, device=param.device).expand(shape)
        like = DTensor.from_local(outline, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
        self._spec_like = spec_of(like)

    def of(self, grad: torch.Tensor, use: weakref.ref[GradUse]) -> DTensor:
        """Return a DTensor over a gradient on the device, which is flat or has the shape of the shard."""
        local = grad if grad.shape == self._shape else grad.view(self._shape)
        if type(local) is torch.Tensor:  # simulated tensors are a subclass already
            local = WatchedTensor(local, use)
        return DTensor.__new__(DTensor, local, self._spec_like, requires_grad=False)  # __init__ only costs time

    def elsewhere(self, flat: torch.Tensor, use: weakref.ref[GradUse]) -> DTensor:
        """Return a DTensor over a gradient off the device, with the size and dtype of `flat`."""
        memory = OffDeviceTensor(
            self._name, OffloadedGradStorage(self._name, use), flat.dtype, flat.numel(), self._device
        )
        return DTensor(OffDeviceShard.of(memory, self._shape), self._spec_like, requires_grad=False)  # type: ignore[no-untyped-call]


def flat_of(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Return the local part of a `.grad` that autograd or the user set, flat and placed like the parameter.

    A plain tensor is this rank's part, or, if it has the shape of the parameter, the whole gradient.
    """
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    elif not isinstance(grad, DTensor) and isinstance(param, DTensor):
        grad = part_of(grad, param)
    return local_of(grad).reshape(-1)
