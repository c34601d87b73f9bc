"""Watchdog: ranks observe each other, so that one that hangs, died or failed is named by the ranks that wait for it.

Every process whose ranks train a sharded model has one, whoever started it: `shard` begins it.

    when                        what a rank does
    every `BEAT_S`              A thread writes a heartbeat, the last collective that the rank began, and where in the
                                program it stands, to the store of the process group.
    it waits for `STALL_S`      One of the ranks that wait in the same collective reads the status of all. If one of
                                them ended, is silent, or waits in something else, it says so, and nothing more.
                                Shortly before the limit all read it, so that each can name the missing at once.
    it waits for the limit      The thread reports and ends the process, if nothing else did: where the device waits, or
                                where ranks that wait for each other would wait for torch's 10 to 30 minutes
                                (`comm/stalls.py`). Not where somebody else may wake them.
    a collective fails          It reads the status of all ranks twice, `SILENT_S` apart. A rank without a newer
                                heartbeat is dead, stopped, or holds the interpreter lock. Also where a save or a
                                resume waits for ranks.
    any other failure           It writes the reason, for the ranks that it leaves.
    the store does not answer   It says so, and ends no later.

A rank that computes is never ended by others, nor is who waits for it: only the timeout of the process group's own
collectives does that. But a rank that holds the interpreter lock in one call for longer than the limit gives no sign of
life. The first report in the store is the report of all ranks. Training is not slowed down: a step only counts its
collectives (`comm/collective_log.py`).
"""

from __future__ import annotations

import atexit
import dis
import json
import os
import socket
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from functools import lru_cache
from itertools import count
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from dzero.comm.collective_log import CollectiveLog
from dzero.comm.stalls import (
    NO_ERROR,
    STALL_S,
    TRANSFERS,
    WAIT,
    RankStatus,
    all_wait,
    met,
    report,
    silent,
    stuck,
)
from dzero.errors import PACKAGE, RankLost, ReportedElsewhere, RunError, first_line
from dzero.mesh import timeout_of_ranks
from dzero.rendezvous import BoundedStore, StoreLost
from dzero.utils.torch_internals import (
    STORES,
    another_connection,
    are_all_in_default_store,
    is_default_store,
    is_in_default_store,
)

BEAT_S = 1.0
SILENT_S = 2.5 * BEAT_S
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
AROUND = ("torch/_ops.py", "torch/_library/", "torch/distributed/c10d_logger.py", "torch/utils/_contextlib.py")
"""Files of torch with functions that only call others: of an operator, or of what a decorator wraps."""
WAITS = ("wait", "wait_tensor")
"""Methods in C, and functions, that wait for a collective that was begun before."""
VARIABLE = ("LOAD_FAST", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_DEREF")
COMPUTES = ("_object_to_tensor", "_tensor_to_object")
"""Functions in files of `TORCHS_OWN` that wait for no rank: they pickle."""


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
        self._stale, self._stale_told, self._number = list[RankStatus](), "", 0
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
        with suppress(StoreLost):
            self._number = (self._store.add("begun", 1) - 1) // self._ranks
            if next(_begun):  # default groups of a process may share a store: what ranks wrote when they left another
                self._stale = [place for place in self._read() if place is not None and place.ended]
                self._stale_told = self._told()
            self._write(self._status())  # a rank that hangs before its first beat is silent, not one that is not there
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
        ended = "" if error is None else f"{type(error).__name__}: {first_line(error)}"
        try:
            # Groups are made before there is a collective log, and raise RuntimeError if a rank is lost.
            if isinstance(error, RankLost) or (
                isinstance(error, RuntimeError) and (self._starting or _is_of_torchs_own(error))
            ):
                self._tell(error)
        finally:
            self.stop(ended or NO_ERROR)

    # In the thread

    def _run(self) -> None:
        try:
            while not self._over.wait(BEAT_S):
                if not self.is_of(dist.group.WORLD):
                    self.stop(NO_ERROR)
                    return
                self._beat()
        except RunError as found:
            self._end(found)
        except Exception as error:  # a fault of its own must not look as if this rank gave no sign of life
            _note(f"the watchdog of rank {self._rank} ends: {type(error).__name__}: {first_line(error)}")
            with suppress(StoreLost):
                self._store.delete_key(str(self._rank))

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
        if is_late and (told := self._told()):
            raise ReportedElsewhere(told)
        has_turn = self._store.compare_set(turn, "", str(self._rank)) == str(self._rank)
        if not has_turn and status.waits_s < self._limit_s - SILENT_S - 2 * BEAT_S:
            return
        places = self._read()
        before = stall.before(places)  # near the limit on every rank, whose error `_tell` then explains at once
        if not has_turn:
            return
        gone = silent(before, places)
        awaited = met(places, self._rank)
        locked, together = self._rank in stuck(places, gone), all_wait(awaited, own=True)
        if is_late and (locked or together or (self._is_on_device() and status.waits_s > self._timeout_s)):
            self._say(places, gone, TimeoutError("timed out"), within=f" within {self._limit_s:g} s")
        slow = all_wait(awaited, own=False) and status.waits_s > SLOW_S and self._slow_notes < SLOW_NOTES
        what = "ranks that wait" if locked else "a slow collective" if slow else "ranks that compute"
        if (locked or slow or status.waits_s > BUSY_S) and stall.is_new(what):
            self._slow_notes += slow
            where = json.dumps([place and (place.count, place.place, place in gone) for place in places])
            if self._store.add(f"noted {self._number} {where}", 1) == 1:
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
        (number, last), at, frame, meets, everybody = log.at, "", None, "", (0, self._ranks)
        group: tuple[int, ...] = everybody
        trains = log.thread or self._trains
        if trains not in sys._current_frames():  # whoever trained has ended
            trains = threading.main_thread().ident or trains
        beside = next((each.beside[0] for each in logs if each.beside and each.beside[1] == trains), None)
        own = beside is not None or log.waits or self._is_on_device()
        if beside is not None:
            at = meets = beside
        elif log.moves and not log.is_waiting:
            at, meets = "a transfer between pipeline stages", TRANSFERS[0]
        elif own:
            meets, group = last, everybody if (of := log.group) is None else as_range(of)
        else:
            # In no variable, since this call's own frame is among them: the cycle would keep what all frames refer to.
            frame, at, meets, group = standing(sys._current_frames().get(trains))
        where = (id(log), number, log.transfers, beside) if own else frame and (id(frame), frame.f_lasti)
        waits_s = self._wait.lasts_s(where, frame)
        self._beats += 1
        who, waits = (self._rank, self._host, self._pid), own or frame is not None
        return RankStatus(*who, self._beats, number, last, ended, waits, own, meets, group, waits_s, at)

    def _write(self, status: RankStatus) -> None:
        self._store.set(str(self._rank), json.dumps(asdict(status)))

    def _read(self) -> list[RankStatus | None]:
        keys = [str(rank) for rank in range(self._ranks)]
        there = keys if self._store.check(keys) else [key for key in keys if self._store.check([key])]
        found = dict(zip(there, self._store.multi_get(there), strict=True))
        places = [RankStatus(**json.loads(found[key])) if key in found else None for key in keys]
        return [None if place in self._stale else place for place in places]

    def _told(self) -> str:
        """Return the report of all ranks; empty if there is none, or that of an earlier group alone."""
        told = self._store.multi_get([TOLD])[0].decode() if self._store.check([TOLD]) else ""
        return "" if told == self._stale_told else told

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
                if self._told():
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
            raise RunError(f"{text}\nthe backend says: {first_line(error)}") from error

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
        told = self._store.compare_set(TOLD, self._stale_told, text)
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
        if isinstance(error, RuntimeError) and _is_of_torchs_own(error):
            try:
                watchdog._tell(error)
            except RunError as found:  # which other rank made torch raise it
                _note(str(found))
        watchdog.stop(NO_ERROR if error is None else f"{type(error).__name__}: {first_line(error)}")


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


def standing(frame: FrameType | None) -> tuple[FrameType | None, str, str, tuple[int, ...]]:
    """Return where the program of `frame`, its innermost call, is.

    Returns:
        The call that waits there for other ranks, None if the program computes; the line of the program; what that call
        waits in, empty if processes that are none of the ranks may wake it; and the ranks that it waits for.
    """
    while frame is not None and any(part in frame.f_code.co_filename for part in AROUND):
        frame = frame.f_back
    if frame is None:
        return None, "", "", ()
    name, group = "", tuple[int, ...]()
    if frame.f_code.co_filename.endswith(TORCHS_OWN):
        if frame.f_code.co_name not in COMPUTES:
            name, group = frame.f_code.co_name, _ranks_of(frame)
    elif called_by(frame) in WAITS:
        name, group = called_by(frame), (0, dist.get_world_size()) if are_all_in_default_store() else ()
    waits, meets = frame if name else None, (WAIT if name in WAITS else name) if group else ""
    at: FrameType | None = frame
    while at is not None:
        file = at.f_code.co_filename
        if not file.startswith(LIBRARIES) and not file.startswith("<frozen "):
            line = f"{Path(file).name}:{at.f_lineno} ({at.f_code.co_name})"
            return waits, f"{name} at {line}" if name else line, meets, group
        at = at.f_back
    return waits, name, meets, group


def _ranks_of(call: FrameType) -> tuple[int, ...]:
    """Return the ranks that a call of torch.distributed waits for, as arguments of `range`; none if others wake it."""
    known = call.f_locals
    store = known.get("store", getattr(known.get("opts"), "store", None))  # the latter since torch 2.14
    if "group" not in known and store is not None:  # a group that is being made
        return (0, dist.get_world_size()) if is_default_store(store) else ()
    try:
        return as_range(known.get("group")) if is_in_default_store(known.get("group")) else ()
    except (KeyError, TypeError, ValueError):  # no group, or one that was made beside the default one
        return ()


def as_range(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Return the ranks of a group as arguments of `range`; none if they are no range, or the group is gone."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError):
        return ()
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    found = (ranks[0], ranks[-1] + (1 if step > 0 else -1), step)
    return found if step and [*range(*found)] == ranks else ()


def called_by(frame: FrameType) -> str:
    """Return the name of the method in C that a frame calls just now; empty if it is in none.

    A `wait` is empty, too, if the frame has it from a variable with something else than torch's `Work`.
    """
    name, variable = _methods(frame.f_code).get(frame.f_lasti, ("", ""))
    known = {**frame.f_globals, **frame.f_locals} if name in WAITS else {}
    return name if variable not in known or isinstance(known[variable], dist.Work) else ""


@lru_cache(maxsize=256)
def _methods(code: CodeType) -> dict[int, tuple[str, str]]:
    """Return the names of the methods that code calls, and of the variables that have them, by the offset of the call.

    An object that is in no variable has an empty name.
    """
    named, found, before = dict[object, tuple[str, str]](), dict[int, tuple[str, str]](), ""
    for each in dis.get_instructions(code):
        start = each.positions and (each.positions.lineno, each.positions.col_offset)
        if each.opname in ("LOAD_METHOD", "LOAD_ATTR"):
            named[start] = str(each.argval), before
        elif each.opname.startswith("CALL") and start in named:
            found[each.offset] = named[start]
        before = str(each.argval) if each.opname in VARIABLE else ""
    return found


def _is_of_torchs_own(error: Exception) -> bool:
    """Return whether the error is from a collective that torch began itself, between pipeline stages or along tp."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return isinstance(error, RuntimeError) and any(frame.filename.endswith(TORCHS_OWN) for frame in frames)


def _is_timeout(error: Exception) -> bool:
    """Return whether an error of a backend says that a time was over."""
    return "imed out" in str(error) or "timeout" in str(error)
