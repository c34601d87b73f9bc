"""The `.grad` of sharded parameters: DTensors over the reduced gradients of their unit, with every edit noticed.

After the last microbatch's reduction each trained parameter has one, as after any backward, until the optimizer's step:

    the gradient lives on     local tensor of `.grad`                     an operation on it
    device                    `WatchedTensor`, over the reduced buffer    runs on the buffer
    host, disk                `OffDeviceShard`                          waits for it; what was written goes back there

torch's version counters do not see every edit (foreach operations on DTensors bump none), so these tensors do: each
operation that writes tells `GradUse.write`. What was found at reduce time, norms and finiteness, then no longer holds.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dzero.zero.dtensors import local_of
from dzero.zero.offloaded_param import OffDeviceShard, OffDeviceTensor
from dzero.zero.watched_tensor import WatchedTensor, Watcher

USED_UP = "its gradient was used up by step(), or dropped; clone what is to stay"


class GradUse(Watcher, Protocol):
    """The owner of gradients, told of what is done with them through `.grad`. `generation`: counts steps."""

    generation: int

    def write(self) -> None:
        """As `Watcher.write`. Raises RuntimeError where the gradients are in use already."""

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter's gradient that lives off the device, once it has arrived; of one on disk a copy."""

    def put(self, name: str, flat: torch.Tensor) -> None:
        """Take other values of a gradient that lives off the device; `flat` may be what `read` returned."""


class OffloadedGradStorage:
    """The home (`hosted.Home`) of a gradient that lives off the device, for the step that it was made in."""

    def __init__(self, name: str, use: weakref.ref[GradUse]) -> None:
        self._name, self._use = name, use
        self._generation = self._owner().generation

    def get(self) -> torch.Tensor:
        """Return the elements [elems] in host memory: in place, or a copy of what is on disk."""
        return self._current().read(self._name)

    def put(self, flat: torch.Tensor) -> None:
        """Take the elements of `flat` [elems]; it may be what `get` gave."""
        self._current().put(self._name, flat)

    def _owner(self) -> GradUse:
        if (use := self._use()) is None:
            raise RuntimeError(f"{self._name}: its gradient is gone with the optimizer that kept it off the device")
        return use

    def _current(self) -> GradUse:
        use = self._owner()
        if use.generation != self._generation:
            raise RuntimeError(f"{self._name}: {USED_UP}")
        return use


class GradMaker:
    """Makes the `.grad` of one parameter, of the dtype that gradients have in the table.

    mesh, placements: where it differs from the parameter's, as for parts of a shard.
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
        self._spec = like._spec

    def of(self, grad: torch.Tensor, use: weakref.ref[GradUse]) -> DTensor:
        """Return the DTensor over a gradient on the device, flat or of the shard's shape."""
        local = grad if grad.shape == self._shape else grad.view(self._shape)
        if type(local) is torch.Tensor:  # not a simulated one, which is a subclass already
            local = WatchedTensor(local, use)
        return DTensor.__new__(DTensor, local, self._spec, requires_grad=False)  # __init__ only costs time

    def elsewhere(self, flat: torch.Tensor, use: weakref.ref[GradUse]) -> DTensor:
        """Return the DTensor over a gradient that lives off the device, of the size and dtype of `flat`."""
        memory = OffDeviceTensor(
            self._name, OffloadedGradStorage(self._name, use), flat.dtype, flat.numel(), self._device
        )
        return DTensor(OffDeviceShard.of(memory, self._shape), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def flat_of(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of what a user or autograd left in `.grad` of a parameter, flat and placed like it."""
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_of(grad).reshape(-1)
