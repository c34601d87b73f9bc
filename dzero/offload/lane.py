"""Lanes of an offload schedule: each is a queue of actions with its threads, and on a GPU a stream for copies."""

from __future__ import annotations

import itertools
from bisect import insort
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from operator import attrgetter, itemgetter
from threading import Lock
from typing import Any, NamedTuple

import torch

from dzero import streams
from dzero.offload.schedule import ActionKind

AT_ONCE = {ActionKind.LOAD: 3, ActionKind.SPILL: 3}
"""Number of concurrent actions of a lane: disk lanes keep the disk's queue full between two units, others have one."""
Move = tuple[torch.Tensor, torch.Tensor]
"""Pair (destination, source) of tensors with one size and dtype."""


class _QueuedAction(NamedTuple):
    """Action in the queue of its lane, which is sorted by order, then by number."""

    order: int
    number: int
    run: Callable[[], Any]
    earlier: Sequence[Future[Any]]
    future: Future[Any]


class Lane:
    """Queue with one thread or several, and a stream where copies run on streams.

    Attributes:
        threads: Pool of the lane's threads, with one job for each action that is queued or running.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._stream = streams.new_stream(device) if name in (ActionKind.FETCH, ActionKind.EVICT) else None
        at_once = AT_ONCE.get(ActionKind(name.split(" ")[0]), 1)
        bind = partial(streams.set_device, device)
        self.threads = ThreadPoolExecutor(at_once, thread_name_prefix=f"offload {name}", initializer=bind)
        self._queue: list[_QueuedAction] = []
        self._numbers, self._lock = itertools.count(), Lock()

    def start(self, run: Callable[[], Any], earlier: Sequence[Future[Any]], order: int) -> Future[Any]:
        """Queue an action that waits for `earlier`, and return its future."""
        queued = _QueuedAction(order, next(self._numbers), run, earlier, Future())
        with self._lock:
            insort(self._queue, queued, key=itemgetter(0, 1))
        self.threads.submit(self._run_next)
        return queued.future

    def give_way(self, order: int) -> None:
        """Run the queued actions of a smaller `order` that wait for nothing, within an action of this lane."""
        while (chosen := self._take(before=order)) is not None:
            _run(chosen)

    def _run_next(self) -> None:
        if (chosen := self._take()) is not None:  # else `give_way` has run it
            _run(chosen)

    def _take(self, before: int | None = None) -> _QueuedAction | None:
        """Take the action that was started first, or by `order` the first that waits for nothing, if it has an order.

        Without orders, a lane therefore runs actions in the same sequence on all ranks, as those with collectives must.
        If all wait, the one that was started first is taken: all that it waits for was started before it, so lanes that
        wait for each other do not deadlock. With `before`, take only one of a smaller order that waits for nothing.
        """
        with self._lock:
            first = min(self._queue, key=attrgetter("number"), default=None)
            if before is None and (first is None or first.order == 0):
                chosen = first
            else:
                queue = self._queue if before is None else [each for each in self._queue if each.order < before]
                ready = (each for each in queue if all(future.done() for future in each.earlier))
                chosen = next(ready, first if before is None else None)
            if chosen is not None:
                self._queue.remove(chosen)
            return chosen

    @property
    def has_stream(self) -> bool:
        """Whether copies run on a stream."""
        return self._stream is not None

    def ready(self) -> streams.Event:
        """Return an event after the work that was enqueued on the caller's stream so far."""
        return streams.record_event(self._device) if self.has_stream else None

    def copy(self, moves: Sequence[Move], ready: streams.Event, enqueued: Future[streams.Event]) -> None:
        """Copy once the caller's stream has reached `ready`, and put the event after the copies into `enqueued`."""
        if not self.has_stream:
            copy_all(moves)
            return
        with streams.use_stream(self._stream, self._device):
            streams.wait_event(ready, self._device)
            for destination, source in moves:
                destination.copy_(source, non_blocking=True)
            done = streams.record_event(self._device, sleeps=True)  # leaves the core to updates on the host
        enqueued.set_result(done)
        streams.synchronize(done, holding=[tensor for move in moves for tensor in move])


def _run(chosen: _QueuedAction) -> None:
    try:
        chosen.future.set_result(chosen.run())
    except BaseException as error:
        chosen.future.set_exception(error)
        del chosen  # a local of the traceback, which would keep its own future alive


def copy_all(moves: Sequence[Move]) -> None:
    """Copy each source to its destination, in the calling thread."""
    for destination, source in moves:
        destination.copy_(source)
