"""Executor of an offload schedule, with one lane for each kind of action.

A lane has one thread or several, and where there is a GPU also a stream. The executor alone owns them. Disk lanes have
several threads: a unit's transfers start as soon as its slots are free, not when the last block of the previous unit
has ended, so that the disk's queue does not run empty between two units.

Copies never touch freed or overwritten memory, under CUDA's caching allocator too:
    caller's stream   An event is recorded on this stream when an action is started, and the lane's stream waits for it.
                      By then the sources have been computed, and earlier readers of the destinations have ended.
    lifetime          The action references its tensors until the lane has synchronized with the end of the copy, so
                      their memory is not reused while the GPU accesses it.
    next user         A user on the host waits for the action (`wait`), hence for the end of the copy. A stream waits
                      for the event after the copy (`stream_wait`), and the host continues once it is recorded.
On the CPU, the "device" is ordinary memory, and the same actions copy between two places in it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import torch

from dzero import streams
from dzero.comm.spans import span
from dzero.errors import RunError
from dzero.offload.buffer_layout import BufferSlice
from dzero.offload.lane import AT_ONCE, Lane, Move
from dzero.offload.memory_pool import HostMemoryPool, Lease, LeasePhase
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction, OffloadSchedule

PHASES = {
    ActionKind.EVICT: LeasePhase.ARRIVING,
    ActionKind.LOAD: LeasePhase.ARRIVING,
    ActionKind.FETCH: LeasePhase.LEAVING,
    ActionKind.SPILL: LeasePhase.LEAVING,
}
LEAVING = 4


@dataclass(frozen=True)
class LaneUse:
    """Use of a lane.

    A wait for an action is also a wait for the actions before it, and counts for the lane that was running.

    Attributes:
        busy_s: Seconds in which an action was running.
        waited_s: Seconds that callers waited for the lane.
        moved_bytes: Bytes moved.
    """

    busy_s: float = 0.0
    waited_s: float = 0.0
    moved_bytes: int = 0

    def __add__(self, other: LaneUse) -> LaneUse:
        return LaneUse(self.busy_s + other.busy_s, self.waited_s + other.waited_s, self.moved_bytes + other.moved_bytes)


class LaneSpan(NamedTuple):
    """Time in which a lane ran an action, in seconds of `time.perf_counter`."""

    lane: str
    began: float
    ended: float


Chain = list[LaneSpan]
"""The last few actions of a sequence in which each waited for the one before; shows what an action waited for."""
CHAIN_SPANS = 8


class OffloadError(RuntimeError):
    """Failure of an action, caused by the exception that its thread raised."""


class ScratchDiskError(OffloadError, RunError):
    """Failure of an action for a reason that the user can repair: a scratch disk is full, damaged, or missing."""


class ScheduleExecutor:
    """Runs the actions of a schedule.

    Args:
        schedule: Slots and actions.
        memory_pool: Host memory from which the slots are leased.
        device: Device of the tensors that are fetched or evicted.

    Attributes:
        before: Called in the lane before each action. Tests use it to insert delays.
    """

    def __init__(self, schedule: OffloadSchedule, memory_pool: HostMemoryPool, device: torch.device) -> None:
        self.schedule, self.device = schedule, streams.this_device(device)
        self.leases: dict[str, Lease] = {
            slot.name: memory_pool.lease(slot.count, slot.name) for slot in schedule.slots if slot.tier == "host"
        }
        self._use: dict[str, LaneUse] = {}
        self._at_work: dict[str, tuple[int, float]] = {}
        self._counting = Lock()
        self.before: Callable[[ActionKey], None] | None = None
        self._last: dict[ActionKey, Future[Any]] = {}
        self._enqueued: dict[ActionKey, Future[streams.Event]] = {}
        self._users: dict[str, Future[Any]] = {}
        self._chains: weakref.WeakKeyDictionary[Future[Any], Chain] = weakref.WeakKeyDictionary()
        self._tails: dict[str, Chain] = {}
        self._leaving: deque[tuple[ActionKey, Future[Any]]] = deque()
        self._lanes: dict[str, Lane] = {}
        self._open_lanes(schedule.actions)
        weakref.finalize(self, _end, self._lanes)

    def _open_lanes(self, actions: Sequence[OffloadAction]) -> None:
        for lane in {action.key.lane for action in actions} - self._lanes.keys():
            self._lanes[lane] = Lane(lane, self.device)

    def add(
        self, slots: Sequence[BufferSlot], actions: Sequence[OffloadAction], memory_pool: HostMemoryPool | None
    ) -> None:
        """Add slots and actions that were not known when the schedule was made.

        A slot replaces one with the same name, once its users have ended. An action replaces one with the same key.
        Slots on the host are leased from `memory_pool`.
        """
        names, keys = {slot.name for slot in slots}, {action.key for action in actions}
        for name in names & self._users.keys():
            self._users[name].result()
        self.schedule = OffloadSchedule(
            (*(each for each in self.schedule.slots if each.name not in names), *slots),
            (*(each for each in self.schedule.actions if each.key not in keys), *actions),
        )
        for slot in slots:
            if slot.tier == "host":
                assert memory_pool is not None, f"{slot.name} is on the host"
                lease = memory_pool.lease(slot.count, slot.name)
                if (smaller := self.leases.pop(slot.name, None)) is not None:
                    smaller.release()
                self.leases[slot.name] = lease
        self._open_lanes(actions)

    def view(self, place: BufferSlice, elems: int | None = None) -> torch.Tensor:
        """Return the contents of `place`, flat: the first `elems` elements, or all including the padding."""
        lease = self.leases[place.slot]
        return lease.view(place.dtype, place.elems if elems is None else elems, place.start_bytes)

    def move(self, key: ActionKey, moves: Sequence[Move]) -> Future[Any]:
        """Start copying, and return the action's future.

        Sources must not change and destinations must not be used until `wait(key)` returns or the future has ended. At
        most `LEAVING` evictions hold device memory at a time: beyond that, this call waits for the oldest.
        """
        lane = self._lanes[key.lane]
        ready, enqueued = lane.ready(), Future[streams.Event]()
        self._count(key.lane, LaneUse(moved_bytes=sum(source.nbytes for _, source in moves)))
        future = self._start(key, lambda: lane.copy(moves, ready, enqueued))
        if lane.has_stream:
            future.add_done_callback(partial(_pass_failure, enqueued))
            self._enqueued[key] = enqueued
        if key.kind is ActionKind.EVICT:
            self._leaving.append((key, future))
            while len(self._leaving) > LEAVING:
                oldest, left = self._leaving.popleft()
                self._wait(oldest, left, left)
        return future

    def compute(self, key: ActionKey, work: Callable[[], Any], moved_bytes: int = 0) -> Future[Any]:
        """Start `work` in its lane, and return the action's future; `moved_bytes` is its traffic from or to disk."""
        self._count(key.lane, LaneUse(moved_bytes=moved_bytes))
        return self._start(key, work)

    def give_way(self, key: ActionKey) -> None:
        """Let the actions that come before the running action `key` run first; called by its work, between two pieces.

        These are queued actions of its lane with a smaller `order` that wait for nothing.
        """
        self._lanes[key.lane].give_way(self.schedule.by_key[key].order)

    def _start(self, key: ActionKey, work: Callable[[], Any]) -> Future[Any]:
        action = self.schedule.by_key[key]
        earlier = [self._users[slot] for slot in action.slots if slot in self._users]
        before, chain = [self._chains[future] for future in earlier], Chain()
        run = partial(self._run, action, earlier, work, before, chain)
        future = self._lanes[key.lane].start(run, earlier, action.order)
        self._chains[future] = chain
        self._last[key] = future
        self._users.update(dict.fromkeys(action.slots, future))
        return future

    def _run(
        self,
        action: OffloadAction,
        earlier: list[Future[Any]],
        work: Callable[[], Any],
        before: list[Chain],
        chain: Chain,
    ) -> Any:
        for future in earlier:
            future.result()  # raises the error of a failed action, so that nothing uses its missing data
        began, lane = time.perf_counter(), action.key.lane
        before = [each for each in (*before, self._tails.get(lane)) if each]
        longest = max(before, key=lambda each: each[-1].ended, default=[])
        chain += [*longest[1 - CHAIN_SPANS :], LaneSpan(lane, began, began)]
        leases = [self.leases[slot] for slot in action.slots if slot in self.leases]
        phase = PHASES.get(action.key.kind, LeasePhase.COMPUTING)
        for lease in leases:
            lease.enter(phase)
        self._enter(lane)
        try:
            with span(str(action.key)):
                if self.before is not None:
                    self.before(action.key)
                return work()
        except BaseException as error:
            kind = ScratchDiskError if isinstance(error, RunError) else OffloadError
            raise kind(f"{action.key} failed: {error}") from error
        finally:
            self._leave(lane)
            chain[-1] = LaneSpan(lane, began, time.perf_counter())
            if action.key.kind not in AT_ONCE:
                self._tails[lane] = chain
            for lease in leases:
                lease.enter(LeasePhase.HELD)

    def wait(self, *keys: ActionKey) -> None:
        """Wait until the last started action of each key, if any, has ended; raises OffloadError if one failed."""
        for key in keys:
            if (future := self._last.get(key)) is not None:
                self._wait(key, future, future)

    def stream_wait(self, *keys: ActionKey) -> None:
        """Make the current stream wait for the last started copy of each key; without streams, the same as `wait`.

        The host waits until the copy is enqueued, which includes a preceding load from disk, and no longer.
        """
        for key in keys:
            if (enqueued := self._enqueued.get(key)) is None:
                self.wait(key)
            else:
                self._wait(key, self._last[key], enqueued)
                streams.wait_event(enqueued.result(), self.device)

    def _wait(self, key: ActionKey, future: Future[Any], until: Future[Any]) -> None:
        """Wait for `until`, which ends with or before `future`, the action's end, and record the time by lane."""
        began, had_ended = time.perf_counter(), until.done()
        with nullcontext() if had_ended else span(f"wait {key}"):
            until.result()
        if had_ended:
            return
        for lane, waited_s in waited_for(self._chains[future], began, time.perf_counter()).items():
            self._count(lane, LaneUse(waited_s=waited_s))

    def drain(self) -> None:
        """Wait until all started actions have ended; raises OffloadError, and again in later calls, if one failed."""
        self.wait(*self._last)
        self._last.clear()
        self._enqueued.clear()
        self._users.clear()
        self._leaving.clear()

    def take_use(self) -> dict[str, LaneUse]:
        """Return the use of each lane since the last call."""
        with self._counting:
            taken, self._use = self._use, {}
        return taken

    def _count(self, lane: str, use: LaneUse) -> None:
        with self._counting:
            self._use[lane] = self._use.get(lane, LaneUse()) + use

    def _enter(self, lane: str) -> None:
        """Record that an action of the lane has begun; the time of concurrent actions counts once."""
        with self._counting:
            actions, since = self._at_work.get(lane, (0, 0.0))
            self._at_work[lane] = actions + 1, since if actions else time.perf_counter()

    def _leave(self, lane: str) -> None:
        with self._counting:
            actions, since = self._at_work[lane]
            self._at_work[lane] = actions - 1, since
        if actions == 1:
            self._count(lane, LaneUse(busy_s=time.perf_counter() - since))

    def close(self) -> None:
        """End the threads after all started actions have ended."""
        for lane in self._lanes.values():
            lane.threads.shutdown()


def _pass_failure(enqueued: Future[streams.Event], action: Future[Any]) -> None:
    """Pass an action's error to callers that wait for its event, if it failed before the event was recorded."""
    if not enqueued.done() and (error := action.exception()) is not None:
        enqueued.set_exception(error)


def waited_for(chain: Chain, began: float, ended: float) -> dict[str, float]:
    """Return the seconds of a wait for the last action of `chain`, by lane.

    Time that no span of another action explains counts for the lane of the last action.
    """
    waited = {chain[-1].lane: ended - began}
    for each in chain[:-1]:
        seconds = min(each.ended, ended) - max(each.began, began)
        if seconds > 0:
            waited[each.lane] = waited.get(each.lane, 0.0) + seconds
            waited[chain[-1].lane] -= seconds
    return waited


def _end(lanes: dict[str, Lane]) -> None:
    """Shut down without waiting, because a thread of the executor may drop the last reference to it."""
    for lane in lanes.values():
        lane.threads.shutdown(wait=False)
