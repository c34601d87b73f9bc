"""Pool of activation slots in host memory, backed by disk where only a few of them fit in host memory.

    tier    host memory                                      disk
    host    one host slot per activation slot                -
    disk    `ahead` + 2 host slots; activation slot k uses   one piece per activation slot that had to leave its
            the host slot k modulo their number              host slot

A host slot is emptied one save before it is needed, so that the next save finds it free:

    save k    EVICT k to its host slot. SPILL the contents of the next host slot, unless they are on disk already or
              were used in the meantime.
    fetch k   FETCH k from its host slot if k is still there. Otherwise SPILL its contents, LOAD k, then FETCH k.

Activations that were saved last are needed first. They are fetched without a read from disk, and most of them are not
written to disk either. The pool records what each host slot holds in the order in which actions are started. The slot
rule of `offload/schedule.py` guarantees that actions on one slot also run in that order.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dzero.hardware import host_available_bytes
from dzero.offload.disk import DiskStore
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool, require
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction
from dzero.utils.launched import local_ranks

FEWER = "Take smaller microbatches (train.microbatch_sequences), or another tier: offload.activations=device or disk"


class ActivationSlot:
    """Slot of one activation, stored in host slot `turn`; it becomes free when nothing references this object."""

    def __init__(self, number: int, turn: int, free: list[int]) -> None:
        self.number, self.turn, self._free = number, turn, free
        self.on_disk = False

    def __del__(self) -> None:
        # Runs in any thread. Copies that still use the slot end before its next user starts (`offload/schedule.py`).
        self._free.append(self.number)


class ActivationPool:
    """Activation slots that are created on demand.

    Args:
        executor: Runs the copies and the disk transfers.
        pin: Whether to page-lock the host memory, as in `HostMemoryPool`.
        cores: Cores near which host memory is allocated, as in `HostMemoryPool`.
        store: Disk behind host memory, with one piece per activation slot; None for host memory alone.
        ahead: Number of activations to load from disk ahead of their fetch.
    """

    def __init__(
        self,
        executor: ScheduleExecutor,
        *,
        pin: bool,
        cores: Sequence[int] = (),
        store: DiskStore | None = None,
        ahead: int = 0,
    ) -> None:
        self._executor, self._pin, self._cores, self._store = executor, pin, cores, store
        self.ahead = ahead if store is not None else 0
        # One slot in use, which is not emptied, one that is being fetched, and those loaded ahead of it.
        self._turns = self.ahead + 2 if store is not None else None
        self.free: list[int] = []
        self.seat_bytes: dict[int, int] = {}
        self.turn_bytes: dict[int, int] = {}
        self._held: dict[int, Callable[[], ActivationSlot | None]] = {}

    @property
    def host_bytes(self) -> int:
        """Size of all host slots so far, in bytes."""
        return sum(self.turn_bytes.values())

    def take(self, count: int) -> ActivationSlot:
        """Return the smallest free slot of at least `count` bytes; enlarge or create one if none is large enough."""
        free = self.free[:]  # other threads may append meanwhile, but not remove
        fitting = [(size, number) for number in free if (size := self.seat_bytes[number]) >= count]
        number = min(fitting)[1] if fitting else free[-1] if free else len(self.seat_bytes)
        turn = number if self._turns is None else number % self._turns
        self._empty(turn)
        if not fitting:
            self._enlarge(number, turn, count)
        if number in free:
            self.free.remove(number)
        slot = ActivationSlot(number, turn, self.free)
        self._held[turn] = weakref.ref(slot)
        return slot

    def evict(self, slot: ActivationSlot, source: Tensor) -> Future[Any]:
        """Start copying the flat tensor `source` to the slot's host memory."""
        future = self._executor.move(_key(ActionKind.EVICT, slot.number), [(self._on_host(slot, source), source)])
        if self._turns is not None:
            self._empty((slot.turn + 1) % self._turns)
        return future

    def load(self, activation_slots: Sequence[ActivationSlot]) -> None:
        """Start loading slots from disk, in the order of their fetches, as long as each has a host slot of its own."""
        taken = set[int]()
        for slot in activation_slots:
            if slot.turn in taken:
                return
            taken.add(slot.turn)
            self._load(slot)

    def fetch(self, slot: ActivationSlot, destination: Tensor) -> None:
        """Start copying the slot's contents to the flat tensor `destination`; see `stream_wait`."""
        self._load(slot)
        self._executor.move(_key(ActionKind.FETCH, slot.number), [(destination, self._on_host(slot, destination))])

    def stream_wait(self, slot: ActivationSlot) -> None:
        """Make the current stream wait until the slot has been fetched; raises OffloadError if that failed."""
        self._executor.stream_wait(_key(ActionKind.FETCH, slot.number))

    def _load(self, slot: ActivationSlot) -> None:
        if self._held[slot.turn]() is not slot:
            self._empty(slot.turn)
            self._transfer(ActionKind.LOAD, slot)
            self._held[slot.turn] = weakref.ref(slot)

    def _empty(self, turn: int) -> None:
        """Start writing the contents of a host slot to disk, unless they are there already."""
        slot = self._held[turn]() if turn in self._held else None
        if slot is not None and not slot.on_disk:
            self._transfer(ActionKind.SPILL, slot)
            slot.on_disk = True

    def _transfer(self, kind: ActionKind, slot: ActivationSlot) -> None:
        assert self._store is not None, "a host slot of its own for every activation"
        size = self.seat_bytes[slot.number]
        piece = f"activation {slot.number}, {size} bytes"  # pieces cannot grow: a larger slot gets a new one
        if piece not in self._store.sizes:
            self._store.add(piece, size)
        buffer = self._executor.leases[_host(slot.turn)].view(torch.uint8, size)
        move = self._store.read if kind is ActionKind.LOAD else self._store.write
        self._executor.compute(_key(kind, slot.number), partial(_whole, move, piece, buffer), size)

    def _on_host(self, slot: ActivationSlot, like: Tensor) -> Tensor:
        return self._executor.leases[_host(slot.turn)].view(like.dtype, like.numel())

    def _enlarge(self, number: int, turn: int, count: int) -> None:
        """Allocate an activation slot of `count` bytes, and a host slot that is at least as large."""
        host, disk = _host(turn), _disk(number)
        kinds: dict[ActionKind, tuple[str, ...]] = {ActionKind.EVICT: (host,), ActionKind.FETCH: (host,)}
        slots, memory_pool = list[BufferSlot](), None
        if self._store is not None:
            slots.append(BufferSlot(disk, count, tier="disk"))
            kinds |= {ActionKind.SPILL: (host, disk), ActionKind.LOAD: (host, disk)}
        if self.turn_bytes.get(turn, 0) < count:
            require(count, host_available_bytes(), local_ranks(), FEWER)
            slots.append(BufferSlot(host, count))
            memory_pool = HostMemoryPool(count, pin=self._pin, cores=self._cores)
        self._executor.add(
            slots, [OffloadAction(_key(kind, number), names) for kind, names in kinds.items()], memory_pool
        )
        if memory_pool is not None:
            memory_pool.settle()
            self.turn_bytes[turn] = count
        self.seat_bytes[number] = count


def _whole(move: Callable[[str, Tensor], Future[None]], piece: str, buffer: Tensor) -> None:
    move(piece, buffer).result()


def _host(turn: int) -> str:
    return f"activation {turn}"


def _disk(number: int) -> str:
    return f"activation {number} on disk"


def _key(kind: ActionKind, number: int) -> ActionKey:
    return ActionKey(kind, "activation", str(number))
