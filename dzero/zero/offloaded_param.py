"""Parameters in host memory, on disk, or quantized, as tensor subclasses that FSDP2 shards and gathers.

An `OffDeviceShard` reports the mesh's device, as `fully_shard` requires, while its elements are in the storage of an
`OffDeviceTensor`. FSDP2 requests the all-gather input of each shard right before it gathers the unit. `Unit.fetch` then
fetches the unit to the device. A gather is thus the only step of training that waits for an update in flight.

Quantized weights (`precision.frozen`) are gathered as they are stored, on whatever tier, and decoded where they arrive.
Of the names below, `flat` and `storage` are about what is stored, `values` about what it stands for.

    operation on an OffDeviceShard     effect
    view                               another OffDeviceShard of the same memory, also of another dtype
    operator that writes into it       runs in host memory; the result is written back to the storage
    new_zeros                          a new OffDeviceTensor in host memory (FSDP2 pads shards with it)
    any other                          reads a copy on the device

Other code thus sees an ordinary, if slow, tensor. Its reads and writes wait for the unit's update first.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dzero.utils.torch_internals import (
    NO_TORCH_FUNCTION,
    make_wrapper,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map_only,
)
from dzero.zero.dtensors import local_of, written
from dzero.zero.quantized_weights import WeightCodec
from dzero.zero.units import swap


class ParamHooks(Protocol):
    """Callbacks of an offloaded parameter, which its unit implements."""

    def fetch(self, memory: OffDeviceTensor) -> torch.Tensor:
        """Return the parameter's padded shard [elems] on the device."""

    def await_update(self) -> None:
        """Wait for updates and drop fetched shards, before host memory is accessed other than by FSDP2's gathers."""

    def before_write(self) -> None:
        """Record that the parameter is about to be written, so that its master follows."""


class TensorStorage(Protocol):
    """Storage of the elements of an `OffDeviceTensor`."""

    def get(self) -> torch.Tensor:
        """Return the elements [elems] in host memory, in place or as a copy."""

    def put(self, flat: torch.Tensor) -> None:
        """Store the elements of `flat` [elems], which may be the tensor that `get` returned."""


@dataclass
class HostStorage:
    """Storage of elements in the tensor `flat` [elems], in host memory or, quantized, on the device."""

    flat: torch.Tensor
    on_device: bool = False

    def get(self) -> torch.Tensor:
        """Return the tensor itself."""
        return self.flat

    def put(self, flat: torch.Tensor) -> None:
        """Copy the elements of `flat`, unless it is the tensor itself."""
        if flat is not self.flat:
            self.flat.copy_(flat)


@dataclass(eq=False)
class OffDeviceTensor:
    """Flat tensor that reports a device but is stored elsewhere, or in another form.

    Attributes:
        name: Name of the parameter.
        storage: Storage of the elements. It may be replaced, since every OffDeviceShard is only a view.
        dtype: Dtype of the elements; of those that they stand for, if they are quantized.
        elems: Number of elements, likewise.
        device: Device that its views report.
        hooks: Callbacks of the unit; None until the tensor is part of one. The reference is weak because C++ hooks
            hold tensors, so the garbage collector would not find the reference cycle.
        codec: Format of quantized elements, which are stored as uint8; None if they are stored as they are.
        whole: Shape of the unsharded parameter, if it is quantized.
    """

    name: str
    storage: TensorStorage
    dtype: torch.dtype
    elems: int
    device: torch.device
    hooks: weakref.ref[ParamHooks] | None = None
    codec: WeightCodec | None = None
    whole: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, name: str, flat: torch.Tensor, device: torch.device, hooks: weakref.ref[ParamHooks] | None = None
    ) -> OffDeviceTensor:
        """Return one whose storage is `flat` [elems] itself."""
        return cls(name, HostStorage(flat), flat.dtype, flat.numel(), device, hooks)

    @property
    def flat(self) -> torch.Tensor:
        """Elements [elems] as they are stored; `TensorStorage.get`."""
        return self.storage.get()

    @property
    def row_elems(self) -> int:
        """Number of elements at one index of dim 0 of a quantized matrix."""
        return math.prod(self.whole[1:])

    @property
    def is_on_device(self) -> bool:
        """Whether the elements are quantized, and stored on the device itself."""
        return self.codec is not None and isinstance(self.storage, HostStorage) and self.storage.on_device

    @property
    def values(self) -> torch.Tensor:
        """Elements [elems] in `dtype`, in host memory: the stored ones in place, or decoded into a new tensor."""
        flat = self.flat
        if self.codec is None:
            return flat
        values = torch.empty(self.elems // self.row_elems, self.row_elems, dtype=self.dtype)
        self.codec.decode(flat.cpu().view(len(values), -1), values)
        return values.view(-1)

    def store(self, values: torch.Tensor) -> None:
        """Store `values` [elems], which may be what `values` returned; quantized elements are encoded anew."""
        self.storage.put(values if self.codec is None else self.encoded(values))

    def encoded(self, values: torch.Tensor) -> torch.Tensor:
        """Return `values` [elems] in the format of `codec` [bytes]."""
        assert self.codec is not None
        return self.codec.encode(values.view(-1, self.row_elems)).view(-1)

    def quantize(self, codec: WeightCodec, whole: Sequence[int], *, on_device: bool) -> None:
        """Store the elements, of a parameter of shape `whole`, as `codec` from now on, on the host or on the device."""
        values = self.flat.to(self.device)
        self.codec, self.whole = codec, (*whole,)
        stored = self.encoded(values)
        self.storage = HostStorage(stored if on_device else stored.cpu(), on_device)

    def await_update(self) -> None:
        """Call `ParamHooks.await_update`, if there are hooks."""
        if self.hooks is not None and (hooks := self.hooks()) is not None:
            hooks.await_update()

    def before_write(self) -> None:
        """Call `ParamHooks.before_write`, if there are hooks."""
        if self.hooks is not None and (hooks := self.hooks()) is not None:
            hooks.before_write()

    def move_to(self, storage: TensorStorage) -> None:
        """Move the elements to another storage, as they are stored."""
        storage.put(self.storage.get())
        self.storage = storage

    def replace(self, other: OffDeviceTensor) -> None:
        """Take the storage and the format of `other`, with the values of this tensor."""
        other.store(self.values)
        self.storage, self.codec, self.whole = other.storage, other.codec, other.whole


class OffDeviceShard(torch.Tensor):
    """View of `memory` that reports `memory.device`, although its elements are elsewhere."""

    memory: OffDeviceTensor
    __torch_function__ = NO_TORCH_FUNCTION

    @staticmethod
    def __new__(cls, memory: OffDeviceTensor, like: torch.Tensor) -> OffDeviceShard:
        """Create a view with the shape, strides, offset and dtype of `like`, a meta tensor."""
        made: OffDeviceShard = make_wrapper(
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
        """Return a contiguous view of the first elements of `memory`."""
        return cls(memory, torch.empty(size, dtype=memory.dtype, device="meta"))

    @property
    def outline(self) -> torch.Tensor:
        """Meta tensor with the shape, strides and offset of this view."""
        flat = torch.empty(self.memory.elems, dtype=self.memory.dtype, device="meta")
        return self.within(flat)

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the same view of `flat`, the elements of the memory."""
        flat = flat if flat.dtype == self.dtype else flat.view(self.dtype)
        return flat.as_strided(self.size(), self.stride(), flat.storage_offset() + self.storage_offset())

    def read(self) -> torch.Tensor:
        """Wait for updates in flight, and return the elements."""
        self.memory.await_update()
        return self.within(self.memory.values)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OffDeviceShard({self.memory.name}, {self.read()})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary tensor."""
        return self.read().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return an ordinary tensor on the device."""
        return _on_device(self)

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array of a copy on the device; it is read-only, because writes to it would be lost."""
        array = _on_device(self).numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        """Return the elements as nested lists."""
        return self.read().tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Return a capsule of a copy on the device."""
        return _on_device(self).__dlpack__(**options)

    def share_memory_(self) -> OffDeviceShard:
        """Raise NotImplementedError, because the memory belongs to the offload."""
        raise NotImplementedError("share_memory_ on a parameter in host memory: share a clone")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator as listed in the module's table."""
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func.namespace == "c10d":  # writes into its arguments, which its schema does not declare
            raise NotImplementedError(f"{func} on a parameter in host memory: take full_tensor(), or a state dict")
        if isinstance(first, OffDeviceShard) and torch.Tag.inplace_view in func.tags:
            raise NotImplementedError(f"{func} on a parameter in host memory: change the shape of a view or a clone")
        if isinstance(first, OffDeviceShard) and func.is_view:
            outline = first.outline
            views = func(outline, *args[1:], **kwargs)
            if _share_memory(outline, views):  # `contiguous` may copy
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
            memory.before_write()
        opened: dict[OffDeviceTensor, torch.Tensor] = {}
        copies: dict[torch.Tensor, torch.Tensor] = {}
        on_host = partial(_on_host, opened, copies)
        func(*_mapped(args, on_host), **_mapped(kwargs, on_host))
        for memory in memories:
            memory.store(opened[memory])
        for tensor in changed:
            if tensor in copies:
                tensor.copy_(copies[tensor])
        return changed[0] if schema_of(func).returns else None

    def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor], None]:
        """Return the parameter's padded shard on the device as it is stored, as FSDP2's input of the all-gather.

        With more arguments, FSDP2 would require the size of the values, which quantized ones do not have.
        """
        hooks = None if self.memory.hooks is None else self.memory.hooks()
        assert hooks is not None, f"{self.memory.name} is gathered, but belongs to no unit"
        stored, codec = hooks.fetch(self.memory), self.memory.codec
        if codec is not None:
            return (stored.view(-1, codec.row_bytes(self.memory.row_elems)),), None
        return (stored.view(-1, *self.shape[1:]),), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Return the gathered parameter, as it is or decoded; `out` is the one to write to from the second time on.

        The tensors that are returned beside it are those that FSDP2 frees with it.
        """
        (gathered,) = all_gather_outputs
        if self.memory.codec is None:
            return (gathered, ()) if out is None else None
        # What forward saved of the parameter is decoded again for backward: `data` leaves autograd's version as it is.
        shape = self.memory.whole
        values = gathered.new_empty(shape, dtype=self.memory.dtype) if out is None else out.data
        self.memory.codec.decode(gathered[: shape[0]], values.view(shape[0], -1))
        gathered.untyped_storage().resize_(0)  # FSDP2 allocates it for each gather
        return (values, (values,)) if out is None else None


def put_on_host(modules: Sequence[nn.Module], names: Mapping[nn.Parameter, str]) -> None:
    """Replace the parameters in `names` throughout `modules`, so that `fully_shard` puts their shards on the host."""
    wrapped: dict[nn.Parameter, nn.Parameter] = {
        param: nn.Parameter(
            OffDeviceShard.of(OffDeviceTensor.of(name, param.detach().view(-1), param.device), param.shape),
            param.requires_grad,
        )
        for param, name in names.items()
    }
    swap(modules, wrapped)


def memory_of(param: torch.Tensor) -> OffDeviceTensor | None:
    """Return the OffDeviceTensor of a sharded parameter, or None for a parameter on the device."""
    local = local_of(param)
    return local.memory if isinstance(local, OffDeviceShard) else None


def _mapped(tree: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    return tree_map_only(torch.Tensor, change, tree)


def _share_memory(outline: torch.Tensor, views: Any) -> bool:
    own = storage_key(outline.untyped_storage())
    return all(storage_key(view.untyped_storage()) == own for view in tree_leaves(views))


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.read().to(tensor.device, copy=True) if isinstance(tensor, OffDeviceShard) else tensor


def _on_host(
    opened: dict[OffDeviceTensor, torch.Tensor], copies: dict[torch.Tensor, torch.Tensor], tensor: torch.Tensor
) -> torch.Tensor:
    """Return `tensor` in host memory, from `opened` (one tensor for all views of a memory) or `copies` (of others)."""
    if not isinstance(tensor, OffDeviceShard):
        if tensor.device.type != "cpu" and tensor not in copies:
            copies[tensor] = tensor.cpu()
        return copies.get(tensor, tensor)
    if tensor.memory not in opened:
        tensor.memory.await_update()
        opened[tensor.memory] = tensor.memory.values
    return tensor.within(opened[tensor.memory])
