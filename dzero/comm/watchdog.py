"""Watchdog: ranks observe each other, so that one that hangs, died or failed is named by the ranks that wait for it.

Every process whose ranks train a sharded model has one, whoever started it: `shard` begins it.

    when                        what a rank does
    every `BEAT_S`              A thread writes a heartbeat, the last collective that the rank began, and where in the
                                program it stands, to the store of the process group.
    it waits for `STALL_S`      One of the ranks that wait in the same collective reads the status of all. If one of
                                them ended, is silent, or waits in something else, it says so, and nothing more.
                                Shortly before the limit all read it, so that each can name the missing at once.
    it waits for the limit      The thread reports and ends the process, if nothing else did: where the device waits, or
                                where ranks that wait for each other would wait for torch's 10 to 30 minutes. Not where
                                somebody else may wake them: a group with other processes, a transfer under way.
    a collective fails          It reads the status of all ranks twice, `SILENT_S` apart. A rank without a newer
                                heartbeat is dead, stopped, or holds the interpreter lock. Also where a save or a
                                resume waits for ranks.
    any other failure           It writes the reason, for the ranks that it leaves.
    the store does not answer   It says so, and ends no later.

A rank that computes is never ended by others: only the timeout of the process group's own collectives does that. The
first report in the store is the report of all ranks. Training is not slowed down: a step only counts its collectives
(`comm/collective_log.py`).
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dzero.comm.collective_log import CollectiveLog
from dzero.errors import PACKAGE, RankLost, ReportedElsewhere, RunError
from dzero.mesh import timeout_of_ranks
from dzero.rendezvous import BoundedStore, StoreLost
from dzero.utils.torch_internals import STORES, another_connection, is_default_store, is_in_default_store

BEAT_S = 1.0
SILENT_S = 2.5 * BEAT_S
STALL_S = 4.0
"""Seconds that a rank waits in one place before it looks whether the others can still come."""
TURN_S = 5.0
"""Seconds after which another of the ranks that wait in the same place may be the one that looks."""
SLOW_S, SLOW_NOTES = 8.0, 3
"""Seconds after which a line says that all ranks wait in one collective, and how many such lines a rank writes."""
BUSY_S = 60.0
"""Seconds after which ranks are named that others wait for, although they compute."""
LATE_S = 2.0
"""Seconds beyond the limit in which a wait on the host ends by itself, with an error in the main thread."""
LIMIT = timedelta(seconds=120)
"""Limit of ranks that wait for each other in groups whose timeout is torch's default."""
TOLD = "told"
LIBRARIES = tuple(f"{path}/" for path in (PACKAGE, Path(torch.__file__).parents[1], sysconfig.get_path("stdlib")))
TORCHS_OWN = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "pipelining/schedules", "_functional_collectives")
)
AROUND = ("torch/_ops.py", "torch/distributed/c10d_logger.py", "torch/utils/_contextlib.py")
"""Files of torch with functions that only call others: of an operator, or of what a decorator wraps."""
COMPUTES = ("_object_to_tensor", "_tensor_to_object")
"""Functions in files of `TORCHS_OWN` that wait for no rank: they pickle."""
TRANSFERS = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "_wait_batch_p2p")
"""Functions of torch that wait for one other rank, which waits in another one of them."""


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank at its last heartbeat, the number of which is `beat`.

    Attributes:
        count: Number of collectives begun.
        last: Description of the last collective begun.
        ended: Reason why the rank left; empty while it runs.
        waits: Whether the rank waits for other ranks.
        own: Whether it does so in something of dzero's own, in which all ranks meet.
        meets: Where ranks are that it could meet there, without the line of the program; empty if it may be woken by a
            process that is none of the ranks.
        waits_s: Seconds that it has waited in the same place.
        at: Where in the program it stands, unless it waits in its last collective.
    """

    rank: int
    host: str
    pid: int
    beat: int
    count: int
    last: str
    ended: str = ""
    waits: bool = False
    own: bool = True
    meets: str = ""
    waits_s: float = 0.0
    at: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def place(self) -> str:
        """The last collective, and where the rank is since."""
        return f"{self.last}; now {'waits' if self.waits else 'is'} in {self.at}" if self.at else self.last


class Watchdog:
    """Watches the ranks of the default process group, for a run (as a context) or for any loop (`follow`).

    It turns an exception out of a collective into RunError, which names the missing ranks and where all ranks are, or
    into ReportedElsewhere if another rank has reported the same.

    Args:
        timeout: Timeout of the ranks' collectives.
        limit: Limit of ranks that wait for each other; None: the timeout.
        setting: What sets the timeout, for messages, with a place for the seconds.
        end: Ends the process with a report of the thread. None: the thread raises it, for `threading.excepthook`.
    """

    def __init__(
        self,
        timeout: timedelta,
        *,
        limit: timedelta | None = None,
        setting: str = "launch.timeout_s={:g}",
        end: Callable[[RunError], None] | None = None,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._world = weakref.ref(world)
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self._timeout_s, self._limit_s = timeout.total_seconds(), (limit or timeout).total_seconds()
        self._within, self._end = f" within {setting.format(self._timeout_s)}", end or _raise
        self._slow_notes = 0
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._logs: weakref.WeakSet[CollectiveLog] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._latest, self._starting = CollectiveLog(), True
        self._trains = threading.get_ident()
        self._wait, self._stall = _Wait(), _Stall()
        self._beats = 0
        self._over = threading.Event()
        # A connection of its own, so that a thread that waits for the store blocks no other user of the store.
        self._store = BoundedStore(dist.PrefixStore("dzero/watch", another_connection()))  # type: ignore[attr-defined]
        self._stale: frozenset[RankStatus | None] = frozenset()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def follow(self, collective_log: CollectiveLog) -> None:
        """Report on `collective_log` too from now on."""
        with self._lock:
            self._logs.add(collective_log)
        collective_log.explain = self._explain
        self._trains = threading.get_ident()

    def started(self) -> None:
        """Take errors from now on as those of a run whose groups of ranks are all there."""
        self._starting = False

    def start(self) -> None:
        """Begin to write heartbeats."""
        if next(_begun):  # default groups of a process may share a store
            with suppress(StoreLost):  # what ranks wrote when they left an earlier group
                self._stale = frozenset(place for place in self._read() if place is not None and place.ended)
        _running.append(self)
        self._thread.start()

    def stop(self, ended: str) -> None:
        """Write the reason why this rank leaves, and end the thread."""
        with self._lock:
            if self._over.is_set() or self._pid != os.getpid():  # a forked child is not the rank
                return
            self._over.set()
        _running.remove(self)
        try:
            self._write(self._status(ended))
        except StoreLost:
            return  # whoever waits for this rank has lost the store as well
        finally:
            self._store.close()

    def __enter__(self) -> Watchdog:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        ended = "" if error is None else f"{type(error).__name__}: {_first_line(error)}"
        try:
            # Groups are made before there is a collective log, and raise RuntimeError if a rank is lost.
            if isinstance(error, RankLost) or (
                isinstance(error, RuntimeError) and (self._starting or _is_of_torchs_own(error))
            ):
                self._tell(error)
        finally:
            self.stop(ended or "no error")

    # In the thread

    def _run(self) -> None:
        try:
            while not self._over.wait(BEAT_S):
                if not self.is_of(dist.group.WORLD):
                    self.stop("no error")
                    return
                self._beat()
        except RunError as found:
            self._end(found)

    def is_of(self, world: dist.ProcessGroup | None) -> bool:
        """Return whether it watches the ranks of this default group."""
        return world is not None and self._world() is world

    def _beat(self) -> None:
        status = self._status()
        try:
            self._write(status)
            if status.waits_s < min(STALL_S, self._limit_s / 2):
                self._stall = _Stall()
            else:
                self._look(status)
        except StoreLost as lost:
            text = f"rank {self._rank} got no answer in {status.place} for {status.waits_s:.0f} s: {lost}"
            if self._is_late(status.waits_s):
                raise RunError(text) from lost
            if status.waits_s >= STALL_S and self._stall.is_new("the store"):
                _note(text)

    def _look(self, status: RankStatus) -> None:
        """Look whether the others can still come to where this rank waits."""
        stall, is_late = self._stall, self._is_late(status.waits_s)
        turn = f"look/{status.count} {status.place} {int(time.time() // TURN_S)}"  # clocks of nodes may differ a little
        if is_late and self._store.check([TOLD]):
            raise ReportedElsewhere(self._store.multi_get([TOLD])[0].decode())
        has_turn = self._store.compare_set(turn, "", str(self._rank)) == str(self._rank)
        if not has_turn and status.waits_s < self._limit_s - SILENT_S - 2 * BEAT_S:
            return
        places = self._read()
        before = stall.before(places)  # near the limit on every rank, whose error `_tell` then explains at once
        if not has_turn:
            return
        gone = silent(before, places)
        locked, together = is_deadlock(places, gone), is_together(places)
        if is_late and (locked or together or (self._is_on_device() and status.waits_s > self._timeout_s)):
            self._say(places, gone, TimeoutError("timed out"), within=f" within {self._limit_s:g} s")
        slow = together and status.waits_s > SLOW_S and self._slow_notes < SLOW_NOTES
        what = "ranks that wait" if locked else "a slow collective" if slow else "ranks that compute"
        if (locked or slow or status.waits_s > BUSY_S) and stall.is_new(what):
            self._slow_notes += slow
            where = json.dumps([place and (place.count, place.place, place in gone) for place in places])
            if self._store.add(f"noted {where}", 1) == 1:
                waited = f" for {status.waits_s:.0f} s"
                _note(report(places, gone, self._rank, waited, is_pipeline=self._latest.is_pipeline))

    def _is_late(self, waits_s: float) -> bool:
        return waits_s > self._limit_s + (0.0 if self._is_on_device() else LATE_S)

    # In any thread

    def _is_on_device(self) -> bool:
        """Whether the device still runs the last collective; not after an error of its own, which the host reports."""
        try:
            return self._latest.is_on_device
        except RuntimeError:
            return False

    def _status(self, ended: str = "") -> RankStatus:
        with self._lock:
            logs = [*self._logs]
        self._latest = log = max(logs, key=lambda each: (each.waits, each.begun_s), default=self._latest)
        (number, last), at, frame, meets = log.at, "", None, ""
        beside = next((each.beside[0] for each in logs if each.beside and each.beside[1] == self._trains), None)
        own = beside is not None or log.waits or self._is_on_device()
        if beside is not None:
            at = meets = beside
        elif log.moves and not log.is_waiting:
            at, meets = "a transfer between pipeline stages", TRANSFERS[0]
        elif own:
            meets = last
        else:
            frame, at, meets = standing(sys._current_frames().get(self._trains))
        where = (id(log), number, log.transfers, beside) if own else frame and (id(frame), frame.f_lasti)
        waits_s = self._wait.lasts_s(where, frame)
        self._beats += 1
        who, waits = (self._rank, self._host, self._pid), own or frame is not None
        return RankStatus(*who, self._beats, number, last, ended, waits, own, meets, waits_s, at)

    def _write(self, status: RankStatus) -> None:
        self._store.set(str(self._rank), json.dumps(asdict(status)))

    def _read(self) -> list[RankStatus | None]:
        keys = [str(rank) for rank in range(self._ranks)]
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        found = dict(zip(there, self._store.multi_get(there), strict=True))
        places = [RankStatus(**json.loads(found[key])) if key in found else None for key in keys]
        return [None if place in self._stale else place for place in places]

    def _explain(self, error: Exception) -> None:
        """Raise what is known about the ranks that an error of a collective comes from, if it comes from any."""
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        """Raise what other ranks have to do with `error`; return if it is this rank's own."""
        try:
            is_cut = "onnection" in str(error)  # by a rank that ended just now, and may say why
            read_s, before = (not is_cut and self._stall.earlier()) or (time.monotonic(), self._read())
            places = self._read()
            while time.monotonic() < read_s + SILENT_S and (
                silent(before, places) or (is_cut and not any(place is not None and place.ended for place in places))
            ):
                time.sleep(BEAT_S / 4)
                places = self._read()
                if self._store.check([TOLD]):
                    break  # by a rank that has looked for longer
            gone, here = silent(before, places), places[self._rank]
            there = [place for place in places if place is not None]
            begun = {place.last for place in there if here is not None and place.count == here.count}
            is_of_all = not self._starting and (is_cut or _is_timeout(error) or len(begun) > 1)
            if gone or is_of_all or isinstance(error, RankLost) or any(place.ended for place in there):
                self._say(places, gone, error)
        except StoreLost as lost:
            where = self._latest.at[1]
            text = f"rank {self._rank} got no answer in {where}, and where the other ranks are is unknown: {lost}"
            raise RunError(f"{text}\nthe backend says: {_first_line(error)}") from error

    def _say(
        self, places: Sequence[RankStatus | None], gone: Sequence[RankStatus], error: Exception, *, within: str = ""
    ) -> NoReturn:
        """Raise the report of all ranks, which is this rank's if there is none yet; `within`: if not the timeout."""
        if self._limit_s == self._timeout_s:
            within = ""
        text = report(
            places,
            gone,
            self._rank,
            (within or self._within) if _is_timeout(error) else "",
            error,
            is_pipeline=self._latest.is_pipeline,
        )
        told = self._store.compare_set(TOLD, "", text)
        raise (RunError if told == text else ReportedElsewhere)(told) from error


class _Wait:
    """How long a rank has waited in one place, as its thread sees it at every beat."""

    def __init__(self) -> None:
        self._where: object = None
        self._frame: FrameType | None = None
        self._since_s = 0.0

    def lasts_s(self, where: object, frame: FrameType | None) -> float:
        """Return for how long `where` has been the same; 0 if it is None. `frame`: the call, if it is torch's own.

        A frame is kept after `STALL_S` only: then it is certain that no other call has its address, and what it refers
        to lives for a beat more.
        """
        now_s = time.monotonic()
        if where is None or where != self._where or self._frame not in (None, frame):
            self._where, self._frame, self._since_s = where, None, now_s
        lasts_s = now_s - self._since_s
        if lasts_s >= STALL_S:
            self._frame = frame
        return lasts_s


class _Stall:
    """What a rank has found out since it waits in one place."""

    def __init__(self) -> None:
        self._read: list[tuple[float, list[RankStatus | None]]] = []
        self._said: set[str] = set()

    def before(self, places: list[RankStatus | None]) -> list[RankStatus | None]:
        """Keep what was just read; return what was read `SILENT_S` ago, or where there is none, nothing of any rank."""
        now_s = time.monotonic()
        self._read.append((now_s, places))
        old = [index for index, (read_s, _) in enumerate(self._read) if read_s <= now_s - SILENT_S]
        del self._read[: old[-1] if old else 0]
        return self._read[0][1] if old else [None] * len(places)

    def earlier(self) -> tuple[float, list[RankStatus | None]] | None:
        """Return what was read `SILENT_S` ago or before, and when; None if nothing was. In any thread."""
        now_s = time.monotonic()
        return next((read for read in [*self._read] if read[0] <= now_s - SILENT_S), None)

    def is_new(self, what: str) -> bool:
        """Return whether `what` was not asked for before."""
        is_new = what not in self._said
        self._said.add(what)
        return is_new


_begun = count()
_running: list[Watchdog] = []
"""The watchdogs of this process, of which one is of the present default group."""


def begin() -> Watchdog | None:
    """Return the watchdog of the default process group, which begins if there is none; None if no rank could wait."""
    world = dist.group.WORLD
    if world is None or dist.get_world_size() == 1 or dist.get_backend() == "fake" or not STORES.is_there:
        return None
    for watchdog in [*_running]:
        if watchdog.is_of(world):
            return watchdog
    timeout = timeout_of_ranks()
    limit = min(timeout, LIMIT) if timeout in (default_pg_timeout, default_pg_nccl_timeout) else timeout
    watchdog = Watchdog(timeout, limit=limit, setting="the process group's timeout of {:g} s", end=_leave)
    watchdog.started()
    watchdog.start()
    return watchdog


def follow(collective_log: CollectiveLog) -> None:
    """Have the watchdog of the default process group report on `collective_log` too."""
    if (watchdog := begin()) is not None:
        watchdog.follow(collective_log)


@atexit.register
def _say_goodbye() -> None:
    error = getattr(sys, "last_value", None)
    for watchdog in [*_running]:
        watchdog.stop("no error" if error is None else f"{type(error).__name__}: {_first_line(error)}")


def _raise(found: RunError) -> NoReturn:
    raise found


def _leave(found: RunError) -> NoReturn:
    """End the process, whose main thread waits in a backend."""
    get_error_handler().record_exception(found)
    if not isinstance(found, ReportedElsewhere):
        _note(str(found))
    sys.stdout.flush()
    os._exit(1)


def _note(text: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        print(f"dzero: {text}", file=sys.stderr, flush=True)


def standing(frame: FrameType | None) -> tuple[FrameType | None, str, str]:
    """Return where the program of `frame`, its innermost call, is.

    Returns:
        The call of torch.distributed that waits there, None if the program computes; the line of the program; and what
        that call waits in, empty if processes that are none of the ranks may wake it.
    """
    while frame is not None and frame.f_code.co_filename.endswith(AROUND):
        frame = frame.f_back
    waits = frame if frame is not None and frame.f_code.co_filename.endswith(TORCHS_OWN) else None
    waits = None if waits is None or waits.f_code.co_name in COMPUTES else waits
    name = "" if waits is None else waits.f_code.co_name
    meets = name if waits is not None and _is_of_ranks(waits) else ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARIES) and not file.startswith("<frozen "):
            line = f"{Path(file).name}:{frame.f_lineno} ({frame.f_code.co_name})"
            return waits, line if waits is None else f"{name} at {line}", meets
        frame = frame.f_back
    return waits, name, meets


def _is_of_ranks(call: FrameType) -> bool:
    """Return whether a call of torch.distributed waits in a group of ranks of the default one."""
    known = call.f_locals
    if "group" not in known and "store" in known:  # a group that is being made
        return is_default_store(known["store"])
    try:
        return is_in_default_store(known.get("group"))
    except (KeyError, TypeError, ValueError):  # no group, or one that was made beside the default one
        return False


def _is_of_torchs_own(error: Exception) -> bool:
    """Return whether the error is from a collective that torch began itself, between pipeline stages or along tp."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return isinstance(error, RuntimeError) and any(frame.filename.endswith(TORCHS_OWN) for frame in frames)


def _is_timeout(error: Exception) -> bool:
    """Return whether an error of a backend says that a time was over."""
    return "imed out" in str(error) or "timeout" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def silent(before: Sequence[RankStatus | None], now: Sequence[RankStatus | None]) -> list[RankStatus]:
    """Return the ranks that neither wrote a heartbeat nor ended between two readings."""
    return [
        new
        for old, new in zip(before, now, strict=True)
        if old is not None and new is not None and old.beat == new.beat and not new.ended
    ]


def is_deadlock(places: Sequence[RankStatus | None], gone: Sequence[RankStatus]) -> bool:
    """Return whether no rank can go on: each has ended, is `gone`, or waits, and they cannot meet where they wait.

    Ranks that all wait in the same collective may just have a slow network, as two in transfers between them.
    """
    there = [place for place in places if place is not None and not place.ended and place not in gone]
    if None in places or any(place.waits_s < STALL_S or not place.meets for place in there):
        return False
    if sum(place.meets in TRANSFERS for place in there) > 1:
        return False
    return len(there) < len(places) or len({(place.own and place.count, place.meets) for place in there}) > 1


def is_together(places: Sequence[RankStatus | None]) -> bool:
    """Return whether all ranks wait in something of dzero's own, where only the network can hold them up."""
    return all(place is not None and place.own and place.waits and place.waits_s >= STALL_S for place in places)


def report(
    places: Sequence[RankStatus | None],
    gone: Sequence[RankStatus],
    rank: int,
    within: str,
    error: Exception | None = None,
    *,
    is_pipeline: bool = False,
) -> str:
    """Return the message for a wait, or for an `error` out of a collective: the missing ranks, and where all are.

    Args:
        places: Status of each rank.
        gone: Those without a new heartbeat.
        rank: The rank that waits.
        within: How long.
        error: What the backend raised.
        is_pipeline: Whether ranks are stages of a pipeline, which begin different collectives.
    """
    here = places[rank]
    assert here is not None
    there = [place for place in places if place is not None]
    ended = [place for place in there if place.ended]
    elsewhere = [place for place in there if place.waits and place.at and place.meets != here.meets]
    busy = [place for place in there if not place.waits and place != here]
    # At the same count, all ranks must be in the same collective, but for stages of a pipeline.
    alike = [] if is_pipeline else there
    others = [place for place in alike if place.count == here.count and place.last != here.last]
    behind = [place for place in alike if place.count < here.count]
    ahead = [place for place in alike if place.count > here.count]
    if ended:
        why = "; ".join(f"{place} ended with {place.ended}" for place in ended[:3])
    elif gone:
        why = f"{', '.join(map(str, gone[:3]))} gives no sign of life: dead, stopped or hung"
    elif elsewhere:
        why = "; ".join(f"{place} waits in {place.at}" for place in elsewhere[:3])
    elif others:
        why = f"the ranks have diverged: {here} is in {here.last}, {others[0]} in {others[0].last}"
    elif behind:
        why = f"{', '.join(map(str, behind[:3]))} is behind"
    elif ahead:
        why = "; ".join(f"{place} is in {place.last}" for place in ahead[:3])
    elif busy:
        why = f"{', '.join(map(str, busy[:3]))} waits for no other rank"
    else:
        why = "every rank is there"
    where = f"in {here.last}" if here.count else "at the start"
    if isinstance(error, RankLost):
        where = "about a checkpoint"
    elif here.waits and here.at:
        where = f"in {here.at}"
    lines = [f"rank {rank} got no answer {where}{within}: {why}", "last collective of each rank:"]
    said = [] if error is None else [f"the backend says: {_first_line(error)}"]
    return "\n".join([*lines, *_by_place(places, gone), *said])


def _by_place(places: Sequence[RankStatus | None], gone: Sequence[RankStatus]) -> list[str]:
    """Return a line for each place (last collective), with the ranks that are there."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        where = "not there yet" if place is None else place.place + (" at its last beat" if place in gone else "")
        at[where].append(rank)
    return [f"  rank {_ranges(ranks)}: {text}" for text, ranks in at.items()]


def _ranges(ranks: list[int]) -> str:
    """Return ranks as ranges: "0, 2-5" for 0, 2, 3, 4, 5."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
