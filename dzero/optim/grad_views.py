"""The `.grad` of sharded parameters: DTensors over the reduced gradients of their unit, with every edit noticed.

After the last microbatch's reduction each trained parameter has one, as after any backward, until the optimizer's step:

    the gradient lives on     local tensor of `.grad`                an operation on it
    device                    `GradView`, over the reduced buffer    runs on the buffer
    host, disk                `HostShard`, behind it a `GradHome`    waits for it; what was written goes back there

torch's version counters do not see every edit (foreach operations on DTensors bump none), so these tensors do: each
operation that writes tells `GradUse.write`. What was found at reduce time, norms and finiteness, then no longer holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves, tree_map_only

from dzero.zero.hosted import HostMemory, HostShard
from dzero.zero.placed import local_of, written


class GradUse(Protocol):
    """The owner of gradients, told of what is done with them through `.grad`."""

    def write(self) -> None:
        """Somebody is about to write. Raises RuntimeError where the gradients are in use already."""

    def read(self, name: str) -> torch.Tensor:
        """Return a parameter's gradient that lives off the device, once it has arrived; of one on disk a copy."""

    def put(self, name: str, flat: torch.Tensor) -> None:
        """Take other values of a gradient that lives off the device; `flat` may be what `read` returned."""


class GradView(torch.Tensor):
    """A tensor over `plain`, memory of a reduced gradient, whose `use` is told before anything writes into it."""

    plain: torch.Tensor
    use: weakref.ref[GradUse]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, use: weakref.ref[GradUse]) -> GradView:
        """Share the memory of `plain`."""
        made: GradView = torch.Tensor._make_subclass(cls, plain)
        made.plain, made.use = plain, use
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run `func` on the plain tensors; views of a GradView are GradViews."""
        kwargs = dict(kwargs or {})
        changed = [tensor for tensor in written(func, args, kwargs) if isinstance(tensor, cls)]
        if func.namespace == "c10d":  # writes into what it is given without saying so
            changed = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, cls)]
        for tensor in changed:
            tensor.open()
        out = func(*tree_map_only(cls, _plain, args), **tree_map_only(cls, _plain, kwargs))
        if func.is_view and isinstance(first := args[0], cls):
            return tree_map_only(torch.Tensor, lambda view: cls(view, first.use), out)
        return changed[0] if len(changed) == 1 and func.namespace != "c10d" and func._schema.returns else out

    def open(self) -> None:
        """Tell the owner, while there is one, that somebody is about to write."""
        if (use := self.use()) is not None:
            use.write()

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.plain)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as an ordinary tensor."""
        return self.plain.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor."""
        return self.plain.clone()

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.plain.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """As of any tensor; whoever has the array may write into it."""
        self.open()
        return self.plain.numpy(force=force)

    def data_ptr(self) -> int:
        """As of any tensor; whoever has the address may write there."""
        self.open()
        return self.plain.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """As of any tensor; whoever has the storage may write into it."""
        self.open()
        return self.plain.untyped_storage()

    def __dlpack__(self, **options: Any) -> Any:
        """As of any tensor; whoever has the capsule may write into it."""
        self.open()
        return self.plain.__dlpack__(**options)


class GradHome:
    """The home (`hosted.Home`) of a gradient that lives off the device."""

    def __init__(self, name: str, use: weakref.ref[GradUse]) -> None:
        self._name, self._use = name, use

    def get(self) -> torch.Tensor:
        """Return the elements [elems] in host memory: in place, or a copy of what is on disk."""
        return self._owner().read(self._name)

    def put(self, flat: torch.Tensor) -> None:
        """Take the elements of `flat` [elems]; it may be what `get` gave."""
        self._owner().put(self._name, flat)

    def _owner(self) -> GradUse:
        if (use := self._use()) is None:
            raise RuntimeError(f"{self._name}: its gradient is gone with the optimizer that kept it off the device")
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
        self._name, self._shape, self._device, self._mesh = name, shape, param.device, mesh
        outline = torch.empty((), dtype=dtype, device=param.device).expand(shape)
        like = DTensor.from_local(outline, mesh, placements, run_check=False, shape=param.shape, stride=param.stride())
        self._spec = like._spec

    def of(self, flat: torch.Tensor, use: weakref.ref[GradUse], like: torch.Tensor | None = None) -> DTensor:
        """Return the DTensor over a gradient on the device [elems]. like: one that may become it, if it is alike."""
        local = flat.view(self._shape)
        if type(local) is torch.Tensor:  # not a simulated one (plan/simulate.py), which is a subclass already
            local = GradView(local, use)
        if isinstance(like, DTensor) and like.dtype == flat.dtype and like.device_mesh is self._mesh:
            like._local_tensor = local  # to make one takes more time than all else that is done for a parameter
            return like
        return DTensor(local, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]

    def elsewhere(self, flat: torch.Tensor, use: weakref.ref[GradUse]) -> DTensor:
        """Return the DTensor over a gradient that lives off the device, of the size and dtype of `flat`."""
        memory = HostMemory(self._name, GradHome(self._name, use), flat.dtype, flat.numel(), self._device)
        return DTensor(HostShard.of(memory, self._shape), self._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def flat_of(grad: torch.Tensor, param: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of what a user or autograd left in `.grad` of a parameter, flat and placed like it."""
    if isinstance(grad, DTensor) and isinstance(param, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(param.device_mesh, param.placements)
    return local_of(grad).reshape(-1)


def _plain(tensor: GradView) -> torch.Tensor:
    return tensor.plain
