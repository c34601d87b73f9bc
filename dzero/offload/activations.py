"""Activations that wait for backward off the device (offload.activations=host or disk).

What a block keeps of its own inputs leaves the device when the block has saved it, and comes back ahead of its use.
Under full checkpointing that is all a block keeps. The hooks lie around the block's call, outside of the checkpoint,
so they see what the checkpoint saves and not what it recomputes.

    save k     EVICT k starts, beside the block's own work; those before it whose copies have ended leave the device
    use k      waits for FETCH k, and starts FETCH k-1: backward uses last what was saved first. Those before it are
               loaded from disk, where they went there
    freed      the graph drops k: its seat is free for the next save

activation_pool.py has the seats: host memory, and the disk behind it.

The newest, and any that has not left yet, is used where it is. Inputs that need no gradient (tables, masks) are shared
by the blocks and stay, as do parameters, small or strided tensors, and everything else that is saved.

Why no copy meets freed or rewritten memory: as in executor.py, with two additions.
    source        is referenced from here until its copy has ended, so nobody else is given its memory. Who changes it
                  in place before that makes backward raise; later it does not matter: the host has what was saved
    destination   is made on the stream that is current when its copy starts, perhaps for a block on another stream:
                  `record_stream` keeps its memory until that one has used it
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

LEAST_BYTES = ALIGNMENT_BYTES
"""Smaller tensors stay on the device: a slot takes as much at least."""


class OffloadedActivation:
    """A saved tensor, flat, whose seat is taken as long as this lives.

    source: what was saved, until its copy to the host has ended. arrived: what was fetched, until it is used. before:
    what was saved just before, if it still lives. version_there: of the source, when it was last seen.
    """

    def __init__(self, slot: ActivationSlot, source: Tensor, before: Callable[[], OffloadedActivation | None]) -> None:
        self.slot, self.before = slot, before
        self.source: Tensor | None = source
        self.arrived: Tensor | None = None
        self.left: Future[Any] | None = None
        self.dtype, self.elems, self.device = source.dtype, source.numel(), source.device
        self.version = self.version_there = source._version
        self._storage = weakref.ref(source.untyped_storage())

    def is_of(self, tensor: Tensor) -> bool:
        """Whether `tensor`, at the same address, is what was saved here."""
        same = self._storage() is tensor.untyped_storage() and self.version == tensor._version
        return same and (self.dtype, self.elems) == (tensor.dtype, tensor.numel())

    def leave(self) -> bool:
        """Drop the source if its copy has ended. Raises OffloadError where that failed."""
        if self.source is not None and self.left is not None and self.left.done():
            self.left.result()
            self.version_there, self.source = self.source._version, None
        return self.source is None

    @property
    def is_away(self) -> bool:
        """Whether the device has no copy, and none is on its way there."""
        return self.source is None and self.arrived is None


class OffloadedTensor(NamedTuple):
    """In autograd's graph instead of a tensor of this shape."""

    activation: OffloadedActivation
    shape: torch.Size


class ResidentTensor(NamedTuple):
    """A saved tensor, with the version that autograd itself no longer checks when there are hooks."""

    tensor: Tensor
    version: int


class ActivationOffload:
    """Moves what the blocks save of their inputs to seats in `pool`, on a `device` of this type.

    Referenced by the graphs in flight, and weakly by the blocks, which keep everything on the device without their
    optimizer.
    """

    def __init__(self, pool: ActivationPool, device: str) -> None:
        self.pool, self._device = pool, device
        self._saved: weakref.WeakValueDictionary[int, OffloadedActivation] = weakref.WeakValueDictionary()
        self._newest: Callable[[], OffloadedActivation | None] = lambda: None
        self._leaving: list[weakref.ref[OffloadedActivation]] = []

    def attach(self, blocks: Sequence[nn.Module]) -> None:
        """Watch the calls of `blocks` from now on."""
        wrap_method([*blocks], "__call__", partial(_watched, weakref.ref(self)))

    def watch(self, inputs: Iterable[object]) -> AbstractContextManager[object]:
        """While a block runs on `inputs`: move what it saves of them."""
        moving = [each for each in inputs if type(each) is Tensor and each.requires_grad]
        plain = [each for each in moving if each.device.type == self._device]
        addresses = {each.untyped_storage().data_ptr() for each in plain}
        return saved_tensors_hooks(partial(self._save, addresses), self._use) if addresses else nullcontext()

    def _save(self, addresses: set[int], tensor: Tensor) -> OffloadedTensor | ResidentTensor:
        plain = type(tensor) is Tensor and tensor.layout == torch.strided and tensor.is_contiguous()
        if not plain or tensor.nbytes < LEAST_BYTES or tensor.untyped_storage().data_ptr() not in addresses:
            return ResidentTensor(tensor.detach(), tensor._version)
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
            _check(saved.tensor._version, saved.version)
            return saved.tensor
        activation = saved.activation
        self._fetch(activation)
        coming = list(islice(_before(activation), 1 + self.pool.ahead))
        for each in coming[:1]:
            self._fetch(each)
        self.pool.load([each.slot for each in coming[1:] if each.is_away])
        tensor = activation.source
        _check(activation.version_there if tensor is None else tensor._version, activation.version)
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
    """Those saved before it that live, the latest first, up to one that does not."""
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
