"""Parameters that live in host memory (offload.param=host), as FSDP2's extension point wants them.

A `HostShard` says it is a tensor on the mesh's device, as `fully_shard` asks, while its elements lie in a
`HostMemory`. FSDP2 asks each shard for its all-gather input right before it gathers the unit: that is where the unit
is brought to the device (`Unit.bring`), and the one place that has to wait for an update in flight.

    operation on a HostShard             what happens
    a view of it                         another HostShard of the same memory, also of another dtype
    one that writes into it              runs in host memory
    new_zeros                            a new HostMemory (FSDP2 pads shards with it)
    any other                            reads a copy on the device

So ordinary code sees an ordinary, if slow, tensor; and whoever reads or writes waits for the unit's update first.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only


class Door(Protocol):
    """The unit of a parameter."""

    def bring(self, memory: HostMemory) -> torch.Tensor:
        """The parameter's padded shard [elems] on the device."""

    def settle(self) -> None:
        """Somebody is about to read or write host memory past FSDP2: wait for updates, forget what was fetched."""


@dataclass(eq=False)
class HostMemory:
    """One parameter's padded shard `flat` [elems]; every HostShard of it is a view, so `flat` may be moved.

    door: None until the parameter is part of a sharded unit. Weak: tensors are held by hooks in C++, where the garbage
    collector sees no cycle.
    """

    name: str
    flat: torch.Tensor
    device: torch.device
    door: weakref.ref[Door] | None = None

    def another(self, elems: int, dtype: torch.dtype) -> HostMemory:
        """Zeros, behind the same door."""
        return HostMemory(self.name, torch.zeros(elems, dtype=dtype), self.device, self.door)

    def settle(self) -> None:
        """See `Door.settle`."""
        if self.door is not None and (door := self.door()) is not None:
            door.settle()

    def move_to(self, flat: torch.Tensor) -> None:
        """Live in `flat` [elems] from now on."""
        flat.copy_(self.flat)
        self.flat = flat


class HostShard(torch.Tensor):
    """A tensor on `memory.device` by its own account, in host memory in truth."""

    memory: HostMemory
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: HostMemory, like: torch.Tensor) -> HostShard:
        """`like`: a view of `memory.flat`."""
        behind_bytes = memory.flat.storage_offset() * memory.flat.itemsize
        made: HostShard = torch.Tensor._make_wrapper_subclass(
            cls,
            like.size(),
            strides=like.stride(),
            storage_offset=like.storage_offset() - behind_bytes // like.itemsize,
            dtype=like.dtype,
            device=memory.device,
        )
        made.memory = memory
        return made

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, device: torch.device) -> HostShard:
        """A contiguous `tensor`, wherever it is, as one on `device`; what FSDP2 cuts from it is in host memory."""
        return cls(HostMemory(name, tensor.view(-1), device), tensor)

    @property
    def data_on_host(self) -> torch.Tensor:
        """The elements, in place."""
        flat = self.memory.flat
        flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        return flat.as_strided(self.size(), self.stride(), flat.storage_offset() + self.storage_offset())

    def read(self) -> torch.Tensor:
        """The elements, as they are once updates in flight have ended."""
        self.memory.settle()
        return self.data_on_host

    def __repr__(self) -> str:  # type: ignore[override]
        return f"HostShard({self.memory.name}, {self.read()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as an ordinary tensor."""
        return self.read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor on the device."""
        return _on_device(self)

    def numpy(self, *, force: bool = False) -> Any:
        """As of a copy on the device."""
        return _on_device(self).numpy(force=force)

    def tolist(self) -> Any:
        """As of any tensor."""
        return self.read().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Of a copy on the device."""
        return _on_device(self).__dlpack__(**options)

    def share_memory_(self) -> HostShard:
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
        if isinstance(first, HostShard) and torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{func} on a parameter in host memory: change the shape of a view or a clone")
        if isinstance(first, HostShard) and func.is_view:
            views = func(first.data_on_host, *args[1:], **kwargs)
            return tree_map_only(torch.Tensor, lambda view: cls(first.memory, view), views)
        if isinstance(first, HostShard) and func is torch.ops.aten.new_zeros.default:
            size = torch.Size(args[1])
            memory = first.memory.another(size.numel(), kwargs.get("dtype") or first.dtype)
            return cls(memory, memory.flat.view(size))
        written = _written(func, args, kwargs)
        if not any(isinstance(tensor, HostShard) for tensor in written):
            return func(*_mapped(args, _on_device), **_mapped(kwargs, _on_device))
        if not all(isinstance(tensor, HostShard) for tensor in written):
            raise NotImplementedError(f"{func} writes into parameters in host memory and others: call it on each")
        func(*_mapped(args, _on_host), **_mapped(kwargs, _on_host))
        return written[0] if func._schema.returns else None

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Sequence[int], module: object, mp_policy: object
    ) -> tuple[tuple[torch.Tensor], None]:
        """FSDP2 is about to gather: this parameter's padded shard, on the device."""
        door = None if self.memory.door is None else self.memory.door()
        assert door is not None, f"{self.memory.name} is gathered, but belongs to no unit"
        rows = -(-outer_size[0] // mesh.size())
        return (door.bring(self.memory).view(rows, *outer_size[1:]),), None

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
    wrapped = {
        param: nn.Parameter(HostShard.of(name, param.detach(), param.device), param.requires_grad)
        for param, name in names.items()
    }
    for module in {each for of in modules for each in of.modules()} if wrapped else ():
        for attribute, param in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            if param in wrapped:
                setattr(module, attribute, wrapped[param])


def memory_of(param: torch.Tensor) -> HostMemory | None:
    """The host memory of a sharded parameter, None for one that lives on the device."""
    with torch.no_grad():
        local = param.to_local() if isinstance(param, DTensor) else param
    return local.memory if isinstance(local, HostShard) else None


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that `func` writes into, by its schema."""
    by_name = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    into = [by_name.get(each.name) for each in func._schema.arguments if each.alias_info and each.alias_info.is_write]
    return [leaf for leaf in tree_leaves(into) if isinstance(leaf, torch.Tensor)]


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map_only(torch.Tensor, change, tree)


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read().to(tensor.device, copy=True) if isinstance(tensor, HostShard) else tensor


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read() if isinstance(tensor, HostShard) else tensor.cpu()
