"""Runs a schedule: a lane per kind of action, each a thread and, where there is a GPU, a stream. Sole owner of both.

Lanes of the disk have several threads: a unit's transfers start as soon as its slots are free, not when the unit before
has come to its last block, so that the disk's queue does not run empty between two units.

Why no copy meets freed or rewritten memory, under CUDA's caching allocator too:
    the caller's stream   an event is recorded there when an action is started, and the lane's stream waits for it: what
                          was computed is there, and whoever read the destination has read it
    lifetime              the action holds its tensors until the lane has synchronised with the copy's end, so nobody
                          is given their memory while the GPU still uses it
    the next user         on the host waits for the action itself (`wait`), hence for a copy that has ended; on a stream
                          (`stream_wait`) for the event behind the copy, and the host goes on as soon as that is
                          recorded
On the CPU the "device" is ordinary memory and the same actions are copies between two places of it.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
from dzero.offload.memory_pool import HostMemoryPool, Lease, LeasePhase
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction, OffloadSchedule

PHASES = {
    ActionKind.EVICT: LeasePhase.ARRIVING,
    ActionKind.LOAD: LeasePhase.ARRIVING,
    ActionKind.FETCH: LeasePhase.LEAVING,
    ActionKind.SPILL: LeasePhase.LEAVING,
}
LEAVING = 4
AT_ONCE = {ActionKind.LOAD: 3, ActionKind.SPILL: 3}
"""Actions under way in a lane: of the disk as many as units take turns in host memory, else one."""
Move = tuple[torch.Tensor, torch.Tensor]
"""(destination, source), of one size and dtype."""


@dataclass(frozen=True)
class LaneUse:
    """How a lane was used: seconds with work under way, seconds that callers stood waiting for it, bytes moved.

    A caller that waits for one action waits for whatever that one waits for: the lane that was at work is named.
    """

    busy_s: float = 0.0
    waited_s: float = 0.0
    moved_bytes: int = 0

    def __add__(self, other: LaneUse) -> LaneUse:
        return LaneUse(self.busy_s + other.busy_s, self.waited_s + other.waited_s, self.moved_bytes + other.moved_bytes)


class LaneSpan(NamedTuple):
    """A lane at work, by the clock of perf_counter."""

    lane: str
    began: float
    ended: float


Chain = list[LaneSpan]
"""How an action came to end when it did: the last actions of those that each waited for the one before, then itself."""
CHAIN_SPANS = 8


class OffloadError(RuntimeError):
    """An action failed; the cause is what its thread raised."""


class ScratchDiskError(OffloadError, RunError):
    """An action failed for a reason that the user can mend: a scratch disk is full, damaged, or gone."""


class ScheduleExecutor:
    """Leases the schedule's slots from `memory_pool` and runs its actions.

    device: where fetched tensors live. `before`: called in the lane before each action (tests put delays there).
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
        self._leaving: deque[Future[Any]] = deque()
        self._lanes: dict[str, _Lane] = {}
        self._open_lanes(schedule.actions)
        weakref.finalize(self, _end, self._lanes)

    def _open_lanes(self, actions: Sequence[OffloadAction]) -> None:
        for lane in {action.key.lane for action in actions} - self._lanes.keys():
            self._lanes[lane] = _Lane(lane, self.device)

    def add(
        self, slots: Sequence[BufferSlot], actions: Sequence[OffloadAction], memory_pool: HostMemoryPool | None
    ) -> None:
        """More slots, those on the host leased from `memory_pool`, and actions, not known when the schedule was made.

        A slot takes the place of one of the same name, once its users have ended; an action that of one with its key.
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
        """What a slot holds at `place`, flat: its first `elems`, or all with the padding."""
        lease = self.leases[place.slot]
        return lease.view(place.dtype, place.elems if elems is None else elems, place.start_bytes)

    def move(self, key: ActionKey, moves: Sequence[Move]) -> Future[Any]:
        """Start copying. Sources must not change, and destinations not be used, until `wait(key)`, or the future's end.

        At most `LEAVING` evictions hold device memory at a time: beyond, this waits for the oldest.
        """
        lane = self._lanes[key.lane]
        ready, enqueued = lane.ready(), Future[streams.Event]()
        self._count(key.lane, LaneUse(moved_bytes=sum(source.nbytes for _, source in moves)))
        future = self._start(key, lambda: lane.copy(moves, ready, enqueued))
        if lane.has_stream:
            future.add_done_callback(partial(_pass_failure, enqueued))
            self._enqueued[key] = enqueued
        if key.kind is ActionKind.EVICT:
            self._leaving.append(future)
            while len(self._leaving) > LEAVING:
                self._leaving.popleft().result()
        return future

    def compute(self, key: ActionKey, work: Callable[[], Any], moved_bytes: int = 0) -> Future[Any]:
        """Start `work` in its lane; `moved_bytes` by it, to or from the disk."""
        self._count(key.lane, LaneUse(moved_bytes=moved_bytes))
        return self._start(key, work)

    def _start(self, key: ActionKey, work: Callable[[], Any]) -> Future[Any]:
        action = self.schedule.by_key[key]
        earlier = [self._users[slot] for slot in action.slots if slot in self._users]
        before = [self._chains[future] for future in earlier] + [self._tails.get(key.lane, [])]
        chain: Chain = []
        future = self._lanes[key.lane].thread.submit(self._run, action, earlier, work, before, chain)
        self._chains[future] = chain
        if key.kind not in AT_ONCE:
            self._tails[key.lane] = chain
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
            future.result()  # raises what made it fail: nothing runs on what never came
        began = time.perf_counter()
        longest = max((each for each in before if each), key=lambda each: each[-1].ended, default=[])
        chain += [*longest[1 - CHAIN_SPANS :], LaneSpan(action.key.lane, began, began)]
        leases = [self.leases[slot] for slot in action.slots if slot in self.leases]
        phase = PHASES.get(action.key.kind, LeasePhase.COMPUTING)
        for lease in leases:
            lease.enter(phase)
        self._enter(action.key.lane)
        try:
            with span(str(action.key)):
                if self.before is not None:
                    self.before(action.key)
                return work()
        except BaseException as error:
            kind = ScratchDiskError if isinstance(error, RunError) else OffloadError
            raise kind(f"{action.key} failed: {error}") from error
        finally:
            self._leave(action.key.lane)
            chain[-1] = LaneSpan(action.key.lane, began, time.perf_counter())
            for lease in leases:
                lease.enter(LeasePhase.HELD)

    def wait(self, *keys: ActionKey) -> None:
        """Until the last started action of each key has ended; at once for one that never was. Raises OffloadError."""
        for key in keys:
            if (future := self._last.get(key)) is not None:
                self._wait(key, future, future)

    def stream_wait(self, *keys: ActionKey) -> None:
        """Let the current stream wait for the last started copy of each key; without streams, as `wait`.

        The host waits until the copy is enqueued: for what has to be loaded from disk before, and no longer.
        """
        for key in keys:
            if (enqueued := self._enqueued.get(key)) is None:
                self.wait(key)
            else:
                self._wait(key, self._last[key], enqueued)
                streams.wait_event(enqueued.result(), self.device)

    def _wait(self, key: ActionKey, future: Future[Any], until: Future[Any]) -> None:
        """Return when `until` has ended, which comes with `future`, the action's end, or before it."""
        began, had_ended = time.perf_counter(), until.done()
        with nullcontext() if had_ended else span(f"wait {key}"):
            until.result()
        if had_ended:
            return
        for lane, waited_s in waited_for(self._chains[future], began, time.perf_counter()).items():
            self._count(lane, LaneUse(waited_s=waited_s))

    def drain(self) -> None:
        """Until everything that was started has ended. Raises OffloadError, also later, for what failed."""
        self.wait(*self._last)
        self._last.clear()
        self._enqueued.clear()
        self._users.clear()
        self._leaving.clear()

    def take_use(self) -> dict[str, LaneUse]:
        """The use of each lane since the last call."""
        with self._counting:
            taken, self._use = self._use, {}
        return taken

    def _count(self, lane: str, use: LaneUse) -> None:
        with self._counting:
            self._use[lane] = self._use.get(lane, LaneUse()) + use

    def _enter(self, lane: str) -> None:
        """An action of the lane is at work; several at once count once."""
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
        """End the threads, after what was started has ended."""
        for lane in self._lanes.values():
            lane.thread.shutdown()


class _Lane:
    """A thread or several, and where copies run on streams, one of its own."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._device = device
        self._stream = streams.new_stream(device) if name in (ActionKind.FETCH, ActionKind.EVICT) else None
        at_once = AT_ONCE.get(ActionKind(name.split(" ")[0]), 1)
        bind = partial(streams.set_device, device)
        self.thread = ThreadPoolExecutor(at_once, thread_name_prefix=f"offload {name}", initializer=bind)

    @property
    def has_stream(self) -> bool:
        return self._stream is not None

    def ready(self) -> streams.Event:
        """Return the event behind what the caller's stream was given so far."""
        return streams.record_event(self._device) if self.has_stream else None

    def copy(self, moves: Sequence[Move], ready: streams.Event, enqueued: Future[streams.Event]) -> None:
        """Copy, once the caller's stream has come to `ready`; `enqueued` gets the event behind the copies."""
        if not self.has_stream:
            copy_all(moves)
            return
        with streams.use_stream(self._stream, self._device):
            streams.wait_event(ready, self._device)
            for destination, source in moves:
                destination.copy_(source, non_blocking=True)
            done = streams.record_event(self._device, sleeps=True)  # the cores are for updates on the host
        enqueued.set_result(done)
        streams.synchronize(done, holding=[tensor for move in moves for tensor in move])


def _pass_failure(enqueued: Future[streams.Event], action: Future[Any]) -> None:
    """Let who waits for the event of an action that failed before it learn why."""
    if not enqueued.done() and (error := action.exception()) is not None:
        enqueued.set_exception(error)


def waited_for(chain: Chain, began: float, ended: float) -> dict[str, float]:
    """Seconds by lane of a wait for the last action of `chain`; what no span explains is that action's own."""
    waited = {chain[-1].lane: ended - began}
    for each in chain[:-1]:
        seconds = min(each.ended, ended) - max(each.began, began)
        if seconds > 0:
            waited[each.lane] = waited.get(each.lane, 0.0) + seconds
            waited[chain[-1].lane] -= seconds
    return waited


def copy_all(moves: Sequence[Move]) -> None:
    """Here and now."""
    for destination, source in moves:
        destination.copy_(source)


def _end(lanes: dict[str, _Lane]) -> None:
    """Without waiting: the last reference to a swap may be dropped by one of its own threads."""
    for lane in lanes.values():
        lane.thread.shutdown(wait=False)
