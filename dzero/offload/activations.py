"""Offload of activations that blocks save for backward (offload.activations=host or disk).

When a block saves one of its inputs for backward, the tensor is copied off the device, and copied back ahead of its
use. Under full checkpointing this is all that a block saves. The saved-tensor hooks enclose the block's `__call__`,
outside the checkpoint, so they see what the checkpoint saves and not what it recomputes.

    save k     EVICT k starts, and overlaps the block's compute. The device memory of earlier activations is released
               if their copies have ended.
    use k      The current stream waits for FETCH k, and FETCH k-1 starts: backward uses what was saved last first.
               Activations before k-1 are loaded from disk if they were spilled.
    free k     The graph drops k, and its slot is free for the next save.

`offload/activation_pool.py` manages the slots in host memory and on disk.

The newest activation, and any other that is still on the device, is used in place. Inputs that need no gradient
(tables, masks) are shared by the blocks and stay on the device. So do parameters, small or strided tensors, and all
other saved tensors.

Copies never touch freed or overwritten memory, for the reasons in `offload/executor.py` and two more:
    source        The activation references its source until the copy has ended, so the allocator does not reuse the
                  memory. An in-place change before that makes backward raise. A later change is harmless, because the
                  host holds the saved values.
    destination   The destination is allocated on the stream that is current when its copy starts, perhaps for a block
                  on another stream. `record_stream` keeps its memory until that stream has used it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dzero import streams
from dzero.offload.activation_pool import ActivationPool, ActivationSlot
from dzero.offload.memory_pool import ALIGNMENT_BYTES
from dzero.parallel.forward_wrapping import wrap_method
from dzero.utils.torch_internals import version_of

LEAST_BYTES = ALIGNMENT_BYTES
"""Size in bytes below which tensors stay on the device, since a slot takes at least as much."""


class OffloadedActivation:
    """Saved tensor, flattened, that occupies its slot as long as this object is alive.

    Attributes:
        slot: The activation slot.
        before: Weak reference to the activation that was saved just before.
        source: The saved tensor, until its copy to the host has ended.
        arrived: The fetched tensor, until it is used.
        left: Future of the copy to the host.
        version: Version counter of the source when it was saved.
        version_there: Version counter of the source when it was last seen.
    """

    def __init__(self, slot: ActivationSlot, source: Tensor, before: Callable[[], OffloadedActivation | None]) -> None:
        self.slot, self.before = slot, before
        self.source: Tensor | None = source
        self.arrived: Tensor | None = None
        self.left: Future[Any] | None = None
        self.dtype, self.elems, self.device = source.dtype, source.numel(), source.device
        self.version = self.version_there = version_of(source)
        self._storage = weakref.ref(source.untyped_storage())

    def is_of(self, tensor: Tensor) -> bool:
        """Return whether `tensor`, at the same address, is the tensor that was saved here."""
        same = self._storage() is tensor.untyped_storage() and self.version == version_of(tensor)
        return same and (self.dtype, self.elems) == (tensor.dtype, tensor.numel())

    def leave(self) -> bool:
        """Drop the source if its copy has ended, and return whether it is gone; raises OffloadError if it failed."""
        if self.source is not None and self.left is not None and self.left.done():
            self.left.result()
            self.version_there, self.source = version_of(self.source), None
        return self.source is None

    @property
    def is_away(self) -> bool:
        """Whether the device holds neither the source nor a fetched tensor."""
        return self.source is None and self.arrived is None


class OffloadedTensor(NamedTuple):
    """Placeholder in the autograd graph for an offloaded tensor of this shape."""

    activation: OffloadedActivation
    shape: torch.Size


class ResidentTensor(NamedTuple):
    """Saved tensor on the device, with its version, which autograd does not check where there are hooks."""

    tensor: Tensor
    version: int


class ActivationOffload:
    """Moves what blocks save of their inputs on a `device` of this type to slots of `pool`.

    Graphs in flight reference this object, and blocks reference it weakly. After the optimizer is gone, blocks keep
    everything on the device.
    """

    def __init__(self, pool: ActivationPool, device: str) -> None:
        self.pool, self._device = pool, device
        self._saved: weakref.WeakValueDictionary[int, OffloadedActivation] = weakref.WeakValueDictionary()
        self._newest: Callable[[], OffloadedActivation | None] = lambda: None
        self._leaving: list[weakref.ref[OffloadedActivation]] = []

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Offload what calls of `blocks` save from now on."""
        wrap_method([*blocks], "__call__", partial(_watched, weakref.ref(self)))

    def watch(self, inputs: Iterable[object]) -> AbstractContextManager[object]:
        """Return a context for a block's call that offloads what the block saves of its `inputs`."""
        moving = [each for each in inputs if type(each) is Tensor and each.requires_grad]
        plain = [each for each in moving if each.device.type == self._device]
        addresses = {each.untyped_storage().data_ptr() for each in plain}
        return saved_tensors_hooks(partial(self._save, addresses), self._use) if addresses else nullcontext()

    def _save(self, addresses: set[int], tensor: Tensor) -> OffloadedTensor | ResidentTensor:
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous()
        if not plain or tensor.nbytes < LEAST_BYTES or tensor.untyped_storage().data_ptr() not in addresses:
            return ResidentTensor(tensor.detach(), version_of(tensor))
        activation = self._saved.get(tensor.data_ptr())
        if activation is None or not activation.is_of(tensor):
            activation = self._evict(tensor)
        return OffloadedTensor(activation, tensor.shape)

    def _evict(self, tensor: Tensor) -> OffloadedActivation:
        self._leaving = [each for each in self._leaving if (it := each()) is not None and not it.leave()]
        source = tensor.detach().view(-1)
        activation = OffloadedActivation(self.pool.take(tensor.nbytes), source, self._newest)
        activation.left = self.pool.evict(activation.slot, source)
        self._saved[tensor.data_ptr()] = activation
        self._newest = weakref.ref(activation)
        self._leaving.append(self._newest)
        return activation

    def _use(self, saved: OffloadedTensor | ResidentTensor) -> Tensor:
        if isinstance(saved, ResidentTensor):
            _check(version_of(saved.tensor), saved.version)
            return saved.tensor
        activation = saved.activation
        self._fetch(activation)
        coming = list(islice(_before(activation), 1 + self.pool.ahead))
        for each in coming[:1]:
            self._fetch(each)
        self.pool.load([each.slot for each in coming[1:] if each.is_away])
        tensor = activation.source
        _check(activation.version_there if tensor is None else version_of(tensor), activation.version)
        if tensor is None:
            self.pool.stream_wait(activation.slot)
            tensor, activation.arrived = activation.arrived, None
            assert tensor is not None
            streams.record_stream(tensor)
        return tensor.view(saved.shape)

    def _fetch(self, activation: OffloadedActivation) -> None:
        if activation.is_away:
            arrived = torch.empty(activation.elems, dtype=activation.dtype, device=activation.device)
            self.pool.fetch(activation.slot, arrived)
            activation.arrived = arrived


def _before(activation: OffloadedActivation) -> Iterator[OffloadedActivation]:
    """Yield the activations saved before this one, the latest first, until one has been freed."""
    before = activation.before()
    while before is not None:
        yield before
        before = before.before()


def _watched(owner: weakref.ref[ActivationOffload], call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def watched(*args: Any, **kwargs: Any) -> Any:
        activations = owner()
        if activations is None or not torch.is_grad_enabled():
            return call(*args, **kwargs)
        with activations.watch([*args, *kwargs.values()]):
            return call(*args, **kwargs)

    return watched


def _check(version: int, expected: int) -> None:
    if version != expected:
        raise RuntimeError(
            "a tensor that a block needs for backward was changed in place after the block saved it: it is at version "
            f"{version}, expected version {expected}; change a clone of it"
        )
