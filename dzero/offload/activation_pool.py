"""Where activations wait for backward: in slots of host memory, and on disk where only a few of them fit there.

    tier    host memory                                  disk
    host    a slot for each                              -
    disk    `ahead` + 2 slots, used by turns: k modulo   room for each that had to leave its slot
            that is seat k's

A slot is emptied when another needs it, one save ahead, so that the next save finds it free:

    save k    EVICT to its slot; SPILL what holds the next one, unless it is on disk or was used meanwhile
    fetch k   FETCH from its slot if that holds it still (forwarding); else SPILL what is there, LOAD, and FETCH

So what was saved last, and is needed first, is not read, and most of it is not written either. What a slot holds is
known in the order in which actions are started; that none overtakes another there is the rule of slots (schedule.py).
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
from dzero.mesh import local_ranks
from dzero.offload.disk import DiskStore
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool, require
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction

FEWER = "Take smaller microbatches (train.microbatch_sequences), or another tier: offload.activations=device or disk"


class ActivationSlot:
    """An activation's place, free for another one when nobody refers to this. turn: number of its host slot."""

    def __init__(self, number: int, turn: int, free: list[int]) -> None:
        self.number, self.turn, self._free = number, turn, free
        self.on_disk = False

    def __del__(self) -> None:
        """In any thread; what still copies from or to its slots ends before their next user begins (schedule.py)."""
        self._free.append(self.number)


class ActivationPool:
    """Seats for activations, made when they are first needed; `executor` moves what is there.

    pin, cores: of the host memory, as for `HostMemoryPool`. store: the disk behind it, whose pieces are as large as the
    seats, or None; ahead: then, how many seats are loaded ahead of their fetch.
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
        # One in use, whose slot nobody need empty, one that is fetched, and those ahead of it.
        self._turns = self.ahead + 2 if store is not None else None
        self.free: list[int] = []
        self.seat_bytes: dict[int, int] = {}
        self.turn_bytes: dict[int, int] = {}
        self._held: dict[int, Callable[[], ActivationSlot | None]] = {}

    @property
    def host_bytes(self) -> int:
        """Of all host slots so far."""
        return sum(self.turn_bytes.values())

    def take(self, count: int) -> ActivationSlot:
        """The smallest free seat of `count` bytes or more, else a free one made larger, else a new one."""
        free = self.free[:]  # others may be added meanwhile, none removed
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
        """Start copying `source`, flat, to where it waits."""
        future = self._executor.move(_key(ActionKind.EVICT, slot.number), [(self._on_host(slot, source), source)])
        if self._turns is not None:
            self._empty((slot.turn + 1) % self._turns)
        return future

    def load(self, activation_slots: Sequence[ActivationSlot]) -> None:
        """Start to bring what will be fetched, the next first, as far as each has a host slot of its own."""
        taken = set[int]()
        for slot in activation_slots:
            if slot.turn in taken:
                return
            taken.add(slot.turn)
            self._load(slot)

    def fetch(self, slot: ActivationSlot, destination: Tensor) -> None:
        """Start copying to `destination`, flat, for the next `wait`."""
        self._load(slot)
        self._executor.move(_key(ActionKind.FETCH, slot.number), [(destination, self._on_host(slot, destination))])

    def stream_wait(self, slot: ActivationSlot) -> None:
        """Let the current stream wait until it has been fetched. Raises OffloadError for what failed on its way."""
        self._executor.stream_wait(_key(ActionKind.FETCH, slot.number))

    def _load(self, slot: ActivationSlot) -> None:
        if self._held[slot.turn]() is not slot:
            self._empty(slot.turn)
            self._transfer(ActionKind.LOAD, slot)
            self._held[slot.turn] = weakref.ref(slot)

    def _empty(self, turn: int) -> None:
        """Start writing what a host slot holds and nobody has on disk."""
        slot = self._held[turn]() if turn in self._held else None
        if slot is not None and not slot.on_disk:
            self._transfer(ActionKind.SPILL, slot)
            slot.on_disk = True

    def _transfer(self, kind: ActionKind, slot: ActivationSlot) -> None:
        assert self._store is not None, "a host slot of its own for every seat"
        size = self.seat_bytes[slot.number]
        piece = f"activation {slot.number}, {size} bytes"  # a larger one is another: pieces do not grow
        if piece not in self._store.sizes:
            self._store.add(piece, size)
        buffer = self._executor.leases[_host(slot.turn)].view(torch.uint8, size)
        move = self._store.read if kind is ActionKind.LOAD else self._store.write
        self._executor.compute(_key(kind, slot.number), partial(_whole, move, piece, buffer), size)

    def _on_host(self, slot: ActivationSlot, like: Tensor) -> Tensor:
        return self._executor.leases[_host(slot.turn)].view(like.dtype, like.numel())

    def _enlarge(self, number: int, turn: int, count: int) -> None:
        """Make a seat of `count` bytes, and its host slot as large at least."""
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
