"""Watchdog: ranks observe each other, so that one that hangs, died or failed is named by the ranks that wait for it.

    when                       what a rank does
    every `BEAT_S`             A thread writes a heartbeat, and the last collective that the rank began, to a store.
    no progress for half of    It reads the status of all ranks. If its collective fails later, a rank without a newer
    the timeout                heartbeat is dead, stopped, or holds the interpreter lock.
    none for all of it         On a GPU, where the device waits and the host may be blocked in a copy, the thread
                               reports before the backend's watchdog ends the process without a message.
    a peer is gone             It reads the status of all ranks twice, `SILENT_S` apart, and compares as above; also
                               where a save or a resume waits for ranks.
    any other failure          It writes the reason, for the ranks that it leaves.

The first report in the store is the report of all ranks. Training is not slowed down: a step only counts its
collectives (`comm/collective_log.py`).
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import TracebackType

import torch.distributed as dist

from dzero.comm.collective_log import CollectiveLog
from dzero.errors import RankLost, ReportedElsewhere, RunError
from dzero.rendezvous import rendezvous

BEAT_S = 1.0
SILENT_S = 2.5 * BEAT_S
STORE_S = 10.0  # the store answers within this time, unless the rank that hosts it hangs
TOLD = "told"
TORCHS_OWN = tuple(
    f"torch/distributed/{name}.py" for name in ("distributed_c10d", "pipelining/schedules", "_functional_collectives")
)


@dataclass(frozen=True)
class RankStatus:
    """Status of a rank at its last heartbeat, the number of which is `beat`.

    Attributes:
        count: Number of collectives begun.
        last: Description of the last collective begun.
        ended: Reason why the rank left; empty while it runs.
        waits: Whether the rank waits for other ranks.
    """

    rank: int
    host: str
    pid: int
    beat: int
    count: int
    last: str
    ended: str = ""
    waits: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Watchdog:
    """Context around a worker's use of the process group, which explains failures that other ranks caused.

    It turns an exception out of a collective into RunError, which names the missing ranks and where all ranks are, or
    into ReportedElsewhere if another rank has reported the same.
    """

    def __init__(self, timeout: timedelta) -> None:
        self._rank, self._ranks, self._timeout = dist.get_rank(), dist.get_world_size(), timeout
        self._host, self._pid = socket.gethostname(), os.getpid()
        self._collective_log, self._starting = CollectiveLog(), True
        self._beats = 0
        self._stuck: list[RankStatus | None] = []  # all ranks, read when this one had made no progress for a while
        self._stuck_s = 0.0  # when they were read
        self._over = threading.Event()
        # A connection of its own, so that a thread that waits for the store blocks no other user of the store.
        self._store, _, _ = rendezvous("watch", timeout)
        self._store.set_timeout(timedelta(seconds=STORE_S))
        self._thread = threading.Thread(target=self._beat, name="watch", daemon=True)

    def follow(self, collective_log: CollectiveLog) -> None:
        """Report on `collective_log` from now on."""
        self._collective_log, self._starting = collective_log, False

    def __enter__(self) -> Watchdog:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if isinstance(error, Exception):
                # Groups are made before there is a collective log, and raise RuntimeError if a rank is lost.
                by_others = (RankLost, RuntimeError) if self._starting else (RankLost,)
                if self._collective_log.failed or isinstance(error, by_others) or _is_of_torchs_own(error):
                    self._tell(error)
                self._write(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        except dist.DistError as lost:
            raise RunError(f"{error}\nWhere the other ranks are is unknown, their store is gone: {lost}") from error
        finally:
            self._over.set()

    def _beat(self) -> None:
        count, since_s = 0, time.monotonic()
        while not self._over.wait(BEAT_S):
            try:
                self._write()
                if self._collective_log.count != count:
                    count, since_s, self._stuck = self._collective_log.count, time.monotonic(), []
                elif not self._stuck and time.monotonic() - since_s > self._timeout.total_seconds() / 2:
                    self._stuck, self._stuck_s = self._read(), time.monotonic()
                elif self._is_on_device() and time.monotonic() - since_s > self._timeout.total_seconds():
                    self._tell(TimeoutError("timed out: the device has not come to the end of this collective"))
            except dist.DistError:  # the store is gone, and so is the group: ranks in a collective will report it
                return

    def _is_on_device(self) -> bool:
        """Whether the device still runs the last collective; not after an error of its own, which the host reports."""
        try:
            return self._collective_log.is_on_device
        except RuntimeError:
            return False

    def _write(self, ended: str = "") -> None:
        self._beats += 1
        log = self._collective_log
        place = RankStatus(self._rank, self._host, self._pid, self._beats, *log.at, ended, log.waits)
        self._store.set(str(self._rank), json.dumps(asdict(place)))

    def _read(self) -> list[RankStatus | None]:
        keys = [str(rank) for rank in range(self._ranks)]
        there = [key for key in keys if self._store.check([key])] if not self._store.check(keys) else keys
        found = dict(zip(there, self._store.multi_get(there), strict=True))
        return [RankStatus(**json.loads(found[key])) if key in found else None for key in keys]

    def _tell(self, error: Exception) -> None:
        # A start, a save or a resume may begin no collective for a long time although all ranks are there.
        stuck = [] if self._starting or isinstance(error, RankLost) else self._stuck
        before, read_s = (stuck, self._stuck_s) if stuck else (self._read(), time.monotonic())
        places = self._read()
        while time.monotonic() < read_s + SILENT_S and silent(before, places):
            time.sleep(BEAT_S / 4)
            places = self._read()
        gone = silent(before, places) or [place for place in places if place is not None and place.ended]
        if self._starting and not gone and not isinstance(error, RankLost):
            return  # the error is this rank's own
        text = report(
            places, silent(before, places), self._rank, self._timeout, error, self._collective_log.is_pipeline
        )
        told = self._store.compare_set(TOLD, "", text).decode()
        raise (RunError if told == text else ReportedElsewhere)(told) from error


def _is_of_torchs_own(error: Exception) -> bool:
    """Return whether the error is from a collective that torch began itself, between pipeline stages or along tp."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return isinstance(error, RuntimeError) and any(frame.filename.endswith(TORCHS_OWN) for frame in frames)


def silent(before: Sequence[RankStatus | None], now: Sequence[RankStatus | None]) -> list[RankStatus]:
    """Return the ranks that neither wrote a heartbeat nor ended between two readings."""
    return [
        new
        for old, new in zip(before, now, strict=True)
        if old is not None and new is not None and old.beat == new.beat and not new.ended
    ]


def report(
    places: Sequence[RankStatus | None],
    silent: Sequence[RankStatus],
    rank: int,
    timeout: timedelta,
    error: object,
    is_pipeline: bool = False,
) -> str:
    """Return the message for an `error` out of a collective: the missing ranks as `rank` sees them, and where all are.

    `silent` are those without a new heartbeat. With `is_pipeline`, ranks are stages of a pipeline, which begin
    different collectives.
    """
    here = places[rank]
    assert here is not None
    there = [place for place in places if place is not None]
    ended = [place for place in there if place.ended]
    busy = [place for place in there if not place.waits and place != here]
    # At the same count, all ranks must be in the same collective.
    others = [place for place in there if place.count == here.count and place.last != here.last]
    behind = [place for place in there if place.count < here.count]
    if ended:
        why = "; ".join(f"{place} ended with {place.ended}" for place in ended[:3])
    elif silent:
        why = f"{', '.join(map(str, silent[:3]))} gives no sign of life: dead, stopped or hung"
    elif is_pipeline:
        why = f"{', '.join(map(str, busy[:3]))} waits for no other rank" if busy else "every rank is there, and waits"
    elif others:
        why = f"the ranks have diverged: {here} is in {here.last}, {others[0]} in {others[0].last}"
    elif behind:
        why = f"{', '.join(map(str, behind[:3]))} is behind"
    else:
        why = "every rank is there"
    late = "imed out" in str(error) or "timeout" in str(error)
    within = f" within launch.timeout_s={timeout.total_seconds():g}" if late else ""
    where = "about a checkpoint" if isinstance(error, RankLost) else f"in {here.last}" if here.count else "at the start"
    lines = [f"rank {rank} got no answer {where}{within}: {why}", "last collective of each rank:"]
    said = (str(error) or type(error).__name__).splitlines()[0]
    return "\n".join([*lines, *_by_place(places, silent), f"the backend says: {said}"])


def _by_place(places: Sequence[RankStatus | None], silent: Sequence[RankStatus]) -> list[str]:
    """Return a line for each place (last collective), with the ranks that are there."""
    at: dict[str, list[int]] = defaultdict(list)
    for rank, place in enumerate(places):
        where = "not there yet" if place is None else place.last + (" at its last beat" if place in silent else "")
        at[where].append(rank)
    return [f"  rank {_ranges(ranks)}: {text}" for text, ranks in at.items()]


def _ranges(ranks: list[int]) -> str:
    """Return ranks as ranges: "0, 2-5" for 0, 2, 3, 4, 5."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
