"""The bytes of every storage, seen through the operators that make, write or resize it: one definition of a peak.

The same meter runs over real tensors and over fake ones (simulate.py), so that prediction and measurement count
the same. A storage counts from the first operator that it is seen in until its last reference goes; one that FSDP2
resizes counts as what it is now. Not counted: memory that is not torch's (views of host slots, which torch cannot
resize), what an operator takes and frees inside itself, what host kernels (numba) take, and what an allocator keeps.
So the high-water mark lies below an allocator's.

    kind          what
    param         shards that FSDP2 registers between uses
    unsharded     parameters while they are gathered
    grad          gradients, before and after their reduction
    master        fp32 masters or remainders
    moments       both moments
    buffers       of collectives: gathered units before they are copied out, what is reduced, staging
    activations   made in forward (and by the loss), alive: kept for backward, or in use
    temporaries   made in backward and in the step, recomputed activations included

States are claimed by their owner; the rest tells its kind by the operators that it meets, which may be later than the
moment that is asked about: a storage has one kind, the last that it turned out to be.

Note: threads. A dispatch mode belongs to a thread. Backward of CPU tensors runs in the caller's; autograd's own, which
serve CUDA, take over the modes of the caller. Threads of the host's updates see no mode, and make no storage.
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

from dzero.estimate.torch_internals import TorchDispatchMode
from dzero.zero.offloaded_param import OffDeviceShard

KINDS = ("param", "unsharded", "grad", "master", "moments", "buffers", "activations", "temporaries")
Bytes = tuple[int, ...]
"""By kind, in the order of `KINDS`."""


class Where(NamedTuple):
    """A place in a step. `phase`: forward, backward, step. `unit`: whose modules run, or "" outside of all."""

    microbatch: int
    phase: str
    unit: str

    def __str__(self) -> str:
        at = f"{self.phase} of {self.unit}" if self.unit else self.phase
        return at if self.phase == "step" else f"{at}, microbatch {self.microbatch}"


class StorageMoment(NamedTuple):
    """After one operator."""

    where: Where
    bytes: Bytes

    @property
    def total(self) -> int:
        """Of all kinds."""
        return sum(self.bytes)


@dataclass(eq=False)
class _Held:
    """One storage: what kind it turned out to be, whether its owner said so, its bytes now; `left`: they count no more.

    The reference stays as long as the storage: what it calls at the end forgets a number that others will have.
    """

    kind: str
    storage: weakref.ref[torch.UntypedStorage]
    count: int = 0
    claimed: bool = False
    left: bool = False


class _Change(NamedTuple):
    at: int
    held: _Held
    by: int


class StorageMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered. `where`, `kind`: of what operators make from now on; set by whoever drives them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.where, self.kind = Where(0, "", ""), "temporaries"
        self._held: dict[int, _Held] = {}
        self._filled: dict[int, _Held] = {}  # of these, what FSDP2 may have filled, and frees by resizing
        self._changes: list[_Change] = []
        self._points: list[Where] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch calls it; DTensors are left to take themselves apart first."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
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
        """Their storages are of that kind, whatever operators say."""
        for tensor in tensors:
            if (held := self._see(_local(tensor))) is not None:
                held.kind, held.claimed = kind, True

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Their storages lie elsewhere from now on, and count no more."""
        for tensor in tensors:
            if (held := self._see(_local(tensor))) is not None:
                self._change(held, 0)
                held.left = True

    @property
    def total(self) -> int:
        """Of all that is held now."""
        return sum(held.count for held in [*self._held.values()])

    def begin(self) -> None:
        """Forget the moments so far; what is held stays."""
        self._points, self._changes = [], []
        for held in [*self._held.values()]:  # others may free meanwhile
            self._changes.append(_Change(0, held, held.count))

    def moments(self) -> list[StorageMoment]:
        """One for each operator since `begin`, in order."""
        live = dict.fromkeys(KINDS, 0)
        changes = deque(self._changes)
        moments = []
        for at, where in enumerate(self._points):
            while changes and changes[0].at <= at:
                change = changes.popleft()
                live[change.held.kind] += change.by
            moments.append(StorageMoment(where, tuple(live.values())))
        return moments

    def _see(self, tensor: torch.Tensor) -> _Held | None:
        """What is held of a tensor's storage, from now on if it was not yet; None for what has no memory here."""
        if tensor.device.type == "meta" or isinstance(tensor, OffDeviceShard):
            return None
        storage = tensor.untyped_storage()
        held = self._held.get(id(storage))
        if held is None:
            held = _Held(self.kind, weakref.ref(storage, partial(self._freed, id(storage))))
            self._held[id(storage)] = held
            self._change(held, storage.nbytes() if storage.resizable() else 0)
        return held

    def _tell(self, tensor: torch.Tensor, kind: str) -> None:
        held = self._see(tensor)
        if held is not None and not held.claimed and not (kind == "buffers" and held.kind in ("grad", "unsharded")):
            held.kind = kind

    def _look_at_sizes(self) -> None:
        """FSDP2 frees and allocates gathered parameters by resizing them, which no operator shows."""
        for held in [*self._filled.values()]:  # others may free meanwhile
            storage = None if held.left else held.storage()
            if storage is not None and storage.nbytes() != held.count and storage.resizable():
                self._change(held, storage.nbytes())

    def _change(self, held: _Held, count: int) -> None:
        if count != held.count:
            self._changes.append(_Change(len(self._points), held, count - held.count))
            held.count = count

    def _freed(self, key: int, _: object) -> None:
        self._filled.pop(key, None)
        self._change(self._held.pop(key), 0)


def _told_by(func: Any, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    """What an operator tells of its tensors: (kind, tensors)."""
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
    """What FSDP2 gathers into: flat tensors, by one operator where ranks gather, by another where one rank copies."""
    if func.name() == "fsdp::split_with_sizes_copy":
        return kwargs["out"]
    return args[0] if func is torch.ops.aten.copy_.default and args[0].ndim == 1 else ()


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All in nested lists, tuples and dictionaries."""
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
