"""Meter of the bytes of every storage, from the operators that make, write or resize it: one definition of peak memory.

The same meter runs on real and on fake tensors (`simulate.py`), so measurement and prediction count alike. A storage
counts from the first operator that uses it until its last reference is gone, and at its current size if FSDP2 resizes
it. Not counted are memory outside torch (views of host slots, which torch cannot resize), temporaries inside operators,
memory of host kernels (numba), and memory cached by an allocator. The peak is therefore below that of an allocator.

    kind          contents
    param         shards that FSDP2 registers between uses
    unsharded     gathered parameters
    grad          gradients, before and after their reduction
    master        fp32 masters or remainders
    moments       both moments
    buffers       of collectives: gathered units before they are copied out, payloads of reductions, staging
    activations   made in forward and by the loss: saved for backward, or in use
    temporaries   made in backward and in the step, recomputed activations included

The owners of states claim them. The kind of any other storage follows from the operators that use it. A storage has one
kind, the last that was determined, which also applies to earlier moments.

Note: threads. A dispatch mode belongs to a thread. Backward of CPU tensors runs in the caller's thread, and autograd's
threads for CUDA inherit the modes of the caller. Threads of the host's update have no mode, and make no storages.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dzero.zero.offloaded_param import OffDeviceShard

KINDS = ("param", "unsharded", "grad", "master", "moments", "buffers", "activations", "temporaries")
Bytes = tuple[int, ...]
"""Bytes by kind, in the order of `KINDS`."""


class Where(NamedTuple):
    """Place in a step: `phase` is forward, backward or step; `unit` is the unit whose modules run, or ""."""

    microbatch: int
    phase: str
    unit: str

    def __str__(self) -> str:
        at = f"{self.phase} of {self.unit}" if self.unit else self.phase
        return at if self.phase == "step" else f"{at}, microbatch {self.microbatch}"


class StorageMoment(NamedTuple):
    """Bytes after one operator."""

    where: Where
    bytes: Bytes

    @property
    def total(self) -> int:
        """Sum over all kinds."""
        return sum(self.bytes)


@dataclass(eq=False)
class Held:
    """Live storage: its kind, its bytes now, whether its owner claimed it, and whether it has `left` the count.

    The weak reference must live as long as the storage, since its callback removes the id, which later storages may
    reuse.
    """

    kind: str
    storage: weakref.ref[torch.UntypedStorage]
    count: int = 0
    claimed: bool = False
    left: bool = False


class _Change(NamedTuple):
    at: int
    held: Held
    by: int


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts storages; the caller sets `where` and `kind` for what operators make next."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.kind = Where(0, "", ""), "temporaries"
        self._held: dict[int, Held] = {}
        self._filled: dict[int, Held] = {}  # subset that FSDP2 may have filled, and frees by resizing
        self._changes: list[_Change] = []
        self._points: list[Where] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # DTensors and operands in 8 bits dispatch the tensors inside of them
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for tensor in _tensors((args, kwargs, out)):
            self._see(tensor)
        for kind, tensors in _told_by(func, args, kwargs):
            for tensor in _tensors(tensors):
                self._tell(tensor, kind)
        for tensor in _tensors(_filled_by(func, args, kwargs)):
            if (held := self._see(tensor)) is not None:
                self._filled[id(tensor.untyped_storage())] = held
        self._look_at_sizes()
        self._points.append(self.where)
        return out

    def claim(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        """Set the kind of the tensors' storages, regardless of operators."""
        for tensor in tensors:
            if (held := self._see(_local(tensor))) is not None:
                held.kind, held.claimed = kind, True

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Stop counting the tensors' storages, which are elsewhere from now on."""
        for tensor in tensors:
            if (held := self._see(_local(tensor))) is not None:
                self._change(held, 0)
                held.left = True

    @property
    def total(self) -> int:
        """Bytes held now."""
        return sum(held.count for held in [*self._held.values()])

    def begin(self) -> None:
        """Forget all moments so far; storages that are held stay counted."""
        self._points, self._changes = [], []
        for held in [*self._held.values()]:  # other threads may free storages meanwhile
            self._changes.append(_Change(0, held, held.count))

    def moments(self) -> list[StorageMoment]:
        """Return one moment for each operator since `begin`, in order."""
        live = dict.fromkeys(KINDS, 0)
        changes = deque(self._changes)
        moments = []
        for at, where in enumerate(self._points):
            while changes and changes[0].at <= at:
                change = changes.popleft()
                live[change.held.kind] += change.by
            moments.append(StorageMoment(where, tuple(live.values())))
        return moments

    def _see(self, tensor: torch.Tensor) -> Held | None:
        """Return the record of a tensor's storage, made if it is new; None for tensors without memory here."""
        if tensor.device.type == "meta" or isinstance(tensor, OffDeviceShard):
            return None
        storage = tensor.untyped_storage()
        held = self._held.get(id(storage))
        if held is None:
            held = Held(self.kind, weakref.ref(storage, partial(self._freed, id(storage))))
            self._held[id(storage)] = held
            self._change(held, storage.nbytes() if storage.resizable() else 0)
        return held

    def _tell(self, tensor: torch.Tensor, kind: str) -> None:
        held = self._see(tensor)
        if held is not None and not held.claimed and not (kind == "buffers" and held.kind in ("grad", "unsharded")):
            held.kind = kind

    def _look_at_sizes(self) -> None:
        """Update the sizes of gathered parameters, which FSDP2 frees and allocates by resizing, without an operator."""
        for held in [*self._filled.values()]:  # other threads may free storages meanwhile
            storage = None if held.left else held.storage()
            if storage is not None and storage.nbytes() != held.count and storage.resizable():
                self._change(held, storage.nbytes())

    def _change(self, held: Held, count: int) -> None:
        if count != held.count:
            self._changes.append(_Change(len(self._points), held, count - held.count))
            held.count = count

    def _freed(self, key: int, _: object) -> None:
        self._filled.pop(key, None)
        self._change(self._held.pop(key), 0)


def _told_by(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """Yield (kind, tensors) that follow from an operator."""
    name = func.name()
    if name == "fsdp::split_with_sizes_copy":
        yield "buffers", args[0]
        yield "unsharded", kwargs["out"]
    elif name == "fsdp::chunk_cat":
        yield "grad", args[0]
        yield "buffers", kwargs["out"]
    elif func.namespace in ("fsdp", "c10d"):
        yield "buffers", (args, kwargs)


def _filled_by(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the flat tensors that FSDP2 gathers into, by an operator of its own or, with a single rank, by a copy."""
    if func.name() == "fsdp::split_with_sizes_copy":
        return kwargs["out"]
    return args[0] if func is torch.ops.aten.copy_.default and args[0].ndim == 1 else ()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, dict):
        yield from _tensors([*value.values()])


def _local(tensor: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local
