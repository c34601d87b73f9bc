"""Parameters that live in host memory or on disk (offload.param), as FSDP2's extension point wants them.

A `OffDeviceShard` says it is a tensor on the mesh's device, as `fully_shard` asks, while its elements lie in a
`OffDeviceTensor`, or behind it on disk. FSDP2 asks each shard for its all-gather input right before it gathers the
unit: that is where the unit is brought to the device (`Unit.bring`), and the one place that has to wait for an update
in flight.

    operation on a HostShard             what happens
    a view of it                         another HostShard of the same memory, also of another dtype
    one that writes into it              runs in host memory, from where the result goes back to where it lives
    new_zeros                            a new HostMemory (FSDP2 pads shards with it)
    any other                            reads a copy on the device

So ordinary code sees an ordinary, if slow, tensor; and whoever reads or writes waits for the unit's update first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from dzero.zero.dtensors import local_of, written
from dzero.zero.units import swap


class ParamHooks(Protocol):
    """The unit of a parameter."""

    def bring(self, memory: OffDeviceTensor) -> torch.Tensor:
        """The parameter's padded shard [elems] on the device."""

    def await_update(self) -> None:
        """Somebody is about to read or write host memory past FSDP2: wait for updates, forget what was fetched."""

    def write(self) -> None:
        """Somebody is about to write: masters must follow."""


class TensorStorage(Protocol):
    """Where the elements of a `OffDeviceTensor` lie."""

    def get(self) -> torch.Tensor:
        """The elements [elems] in host memory: in place, or a copy of what lies elsewhere."""

    def put(self, flat: torch.Tensor) -> None:
        """Take the elements of `flat` [elems]; it may be what `get` gave."""


@dataclass
class HostStorage:
    """The home of elements that are simply there, in `flat` [elems]."""

    flat: torch.Tensor

    def get(self) -> torch.Tensor:
        """In place."""
        return self.flat

    def put(self, flat: torch.Tensor) -> None:
        """Copied, unless it is there already."""
        if flat is not self.flat:
            self.flat.copy_(flat)


@dataclass(eq=False)
class OffDeviceTensor:
    """One tensor of `elems` elements of `dtype` that is not on `device` and yet said to be there.

    Every HostShard of it is a view, so its `home` may change. door: None until it is part of a sharded unit. Weak:
    tensors are held by hooks in C++, where the garbage collector sees no cycle.
    """

    name: str
    home: TensorStorage
    dtype: torch.dtype
    elems: int
    device: torch.device
    hooks: weakref.ref[ParamHooks] | None = None

    @classmethod
    def of(
        cls, name: str, flat: torch.Tensor, device: torch.device, hooks: weakref.ref[ParamHooks] | None = None
    ) -> OffDeviceTensor:
        """That of `flat` [elems], where it is."""
        return cls(name, HostStorage(flat), flat.dtype, flat.numel(), device, hooks)

    @property
    def flat(self) -> torch.Tensor:
        """The elements [elems]; see `TensorStorage.get`."""
        return self.home.get()

    def await_update(self) -> None:
        """See `ParamHooks.await_update`."""
        if self.hooks is not None and (hooks := self.hooks()) is not None:
            hooks.await_update()

    def write(self) -> None:
        """See `ParamHooks.write`."""
        if self.hooks is not None and (hooks := self.hooks()) is not None:
            hooks.write()

    def move_to(self, home: TensorStorage) -> None:
        """Live there from now on."""
        home.put(self.home.get())
        self.home = home


class OffDeviceShard(torch.Tensor):
    """A tensor on `memory.device` by its own account, in truth elsewhere."""

    memory: OffDeviceTensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: OffDeviceTensor, like: torch.Tensor) -> OffDeviceShard:
        """`like`: its outline, on meta."""
        made: OffDeviceShard = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=memory.device,
        )
        made.memory = memory
        return made

    @classmethod
    def of(cls, memory: OffDeviceTensor, size: Sequence[int]) -> OffDeviceShard:
        """The first elements of `memory`, as a contiguous tensor."""
        return cls(memory, torch.empty(size, dtype=memory.dtype, device="meta"))

    @property
    def outline(self) -> torch.Tensor:
        """Shape, strides and offset, without elements."""
        flat = torch.empty(self.memory.elems, dtype=self.memory.dtype, device="meta")
        return self.within(flat)

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The part of the memory's `flat` that this is a view of."""
        flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        return flat.as_strided(self.size(), self.stride(), flat.storage_offset() + self.storage_offset())

    def read(self) -> torch.Tensor:
        """The elements, as they are once updates in flight have ended."""
        self.memory.await_update()
        return self.within(self.memory.flat)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HostShard({self.memory.name}, {self.read()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as an ordinary tensor."""
        return self.read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor on the device."""
        return _on_device(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Return the elements of a copy on the device; read-only, for what is written there would be lost."""
        array = _on_device(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.read().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Of a copy on the device."""
        return _on_device(self).__dlpack__(**options)

    def share_memory_(self) -> OffDeviceShard:
        """Refused: the memory belongs to the offload."""
        raise NotImplementedError("share_memory_ on a parameter in host memory: share a clone")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """See the table above."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func.namespace == "c10d":  # writes into what it is given without saying so
            raise NotImplementedError(f"{func} on a parameter in host memory: take full_tensor(), or a state dict")
        if isinstance(first, OffDeviceShard) and torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{func} on a parameter in host memory: change the shape of a view or a clone")
        if isinstance(first, OffDeviceShard) and func.is_view:
            views = func(first.outline, *args[1:], **kwargs)
            return tree_map_only(torch.Tensor, lambda view: cls(first.memory, view), views)
        if isinstance(first, OffDeviceShard) and func is torch.ops.aten.new_zeros.default:
            size = torch.Size(args[1])
            zeros = torch.zeros(size.numel(), dtype=kwargs.get("dtype") or first.dtype)
            return cls.of(OffDeviceTensor.of(first.memory.name, zeros, first.memory.device, first.memory.hooks), size)
        changed = written(func, args, kwargs)
        if not any(isinstance(tensor, OffDeviceShard) for tensor in changed):
            return func(*_mapped(args, _on_device), **_mapped(kwargs, _on_device))
        memories = {tensor.memory for tensor in changed if isinstance(tensor, OffDeviceShard)}
        for memory in memories:
            memory.write()
        opened: dict[OffDeviceTensor, torch.Tensor] = {}
        copies: dict[torch.Tensor, torch.Tensor] = {}
        on_host = partial(_on_host, opened, copies)
        func(*_mapped(args, on_host), **_mapped(kwargs, on_host))
        for memory in memories:
            memory.home.put(opened[memory])
        for tensor in changed:
            if tensor in copies:
                tensor.copy_(copies[tensor])
        return changed[0] if func._schema.returns else None

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Sequence[int], module: object, mp_policy: object
    ) -> tuple[tuple[torch.Tensor], None]:
        """FSDP2 is about to gather: this parameter's padded shard, on the device."""
        hooks = None if self.memory.hooks is None else self.memory.hooks()
        assert hooks is not None, f"{self.memory.name} is gathered, but belongs to no unit"
        rows = -(-outer_size[0] // mesh.size())
        return (hooks.bring(self.memory).view(rows, *outer_size[1:]),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[()]] | None:
        """FSDP2 has gathered: the output is the parameter as it is."""
        return (all_gather_outputs[0], ()) if out is None else None


def put_on_host(modules: Sequence[nn.Module], names: Mapping[nn.Parameter, str]) -> None:
    """Wrap the parameters in `names` wherever `modules` have them: `fully_shard` then puts their shards on the host."""
    wrapped: dict[nn.Parameter, nn.Parameter] = {
        param: nn.Parameter(
            OffDeviceShard.of(OffDeviceTensor.of(name, param.detach().view(-1), param.device), param.shape),
            param.requires_grad,
        )
        for param, name in names.items()
    }
    swap(modules, wrapped)


def memory_of(param: torch.Tensor) -> OffDeviceTensor | None:
    """The host memory of a sharded parameter, None for one that lives on the device."""
    local = local_of(param)
    return local.memory if isinstance(local, OffDeviceShard) else None


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map_only(torch.Tensor, change, tree)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read().to(tensor.device, copy=True) if isinstance(tensor, OffDeviceShard) else tensor


def _on_host(
    opened: dict[OffDeviceTensor, torch.Tensor], copies: dict[torch.Tensor, torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    """In `opened`: once for all views of one memory, which then see each other's changes. `copies`: of others."""
    if not isinstance(tensor, OffDeviceShard):
        if tensor.device.type != "cpu" and tensor not in copies:
            copies[tensor] = tensor.cpu()
        return copies.get(tensor, tensor)
    if tensor.memory not in opened:
        tensor.memory.await_update()
        opened[tensor.memory] = tensor.memory.flat
    return tensor.within(opened[tensor.memory])
