"""Launcher of workers for a plain `python train.py`: one per GPU, or two on a CPU.

Workers are forks of one warm process (`launch/warm_process.py`). This process starts them, waits, and reports how the
run ended; it does not import torch. Under torchrun (RANK is set) nothing is launched: the process joins its group.

    event                      the user sees              handling
    a worker raises            its traceback, once; for   The worker reports before it leaves the group. The earliest
                               RunError its message       report is the cause. The others have `LEAVE_S` to leave.
    a worker is killed         its rank and the signal    The same.
    a worker hangs             its rank, and where all    The others report (`comm/watchdog.py`), and the launcher
                               ranks are                  kills it.
    Ctrl-C, SIGTERM,           the signal, and what was   The signal is passed on (the last two as SIGTERM). Workers
    SIGHUP, SIGQUIT            saved                      that can save finish the step first (`launch/signals.py`).
                                                          A second signal ends all. Workers that still run after the
                                                          time to save and `STOP_S` are killed.
    the launcher is killed     nothing                    The kernel kills the workers.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from dzero.errors import RunError
from dzero.launch.signals import EXIT_SAVED, SAME_S, UNWIND_S
from dzero.launch.warm_process import PASSED_ON, ForkExit, ForkMessage, WarmProcess, WorkerFailure, found
from dzero.utils.launched import launched

POLL_S, STORE_S = 0.1, 1.0
LEAVE_S = 2.0
"""Seconds for the other workers to leave once one has failed or was killed. torch would give them 30."""
STOP_S = 10.0
"""Seconds for workers to leave after a signal, beside the time to save. A worker hung in a library does not respond."""


def start(
    entry: Callable[..., None] | str,
    config: Any,
    run_folder: Path,
    *,
    workers: int,
    warm: WarmProcess | None = None,
    save_s: float = 0.0,
) -> None:
    """Run `entry(config, run_folder, device)` in this process if it is a worker, otherwise in new workers.

    Args:
        entry: The function, or its name `module:function`, by which workers import it.
        config: The run's settings, of which workers read `launch`, a `LauncherConfig`.
        run_folder: Folder that the run writes to.
        workers: Number of workers to start; ignored under torchrun.
        warm: Warm process that forks them. None: one is started for this call.
        save_s: Seconds that workers may take to save when a signal asks them to stop.

    Raises:
        RunError: A worker failed; the message says which and why.
        SystemExit: A signal ended the run. The code is `EXIT_SAVED` if the run was saved, else 128 + the signal.
    """
    name = entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
    if launched():
        found("dzero.launch.worker:join")(found(name), config, run_folder)
        return
    with nullcontext(warm) if warm is not None else WarmProcess() as forks, _Signals() as signals:
        _Workers(forks, signals, save_s).run(name, config, run_folder, workers)


class _Workers:
    """Workers of one run, by rank, until all have ended."""

    def __init__(self, warm: WarmProcess, signals: _Signals, save_s: float) -> None:
        self._warm, self._signals, self._save_s = warm, signals, save_s
        self._ranks: dict[int, int] = {}
        self._running: set[int] = set()
        self._ended: dict[int, ForkExit] = {}
        self._reports: list[WorkerFailure] = []
        self._sent: set[tuple[int, int]] = set()
        self._store_fork: int | None = None

    def run(self, entry: str, config: Any, run_folder: Path, workers: int) -> None:
        """Start all workers, wait for them, and report how the run ended."""
        with self._store() as meeting:
            for rank in range(workers):
                fork = self._warm.fork(
                    "dzero.launch.worker:run",
                    entry,
                    config,
                    run_folder,
                    name=f"dzero rank {rank}",
                    env=_environment(rank, workers, *meeting),
                    silent=rank > 0,
                )
                self._ranks[fork] = rank
                self._running.add(fork)
            self._wait()
        codes = {ended.code for ended in self._ended.values()}
        if self._signals.asked and codes != {0}:
            _leave(self._signals.asked[0], saved=EXIT_SAVED in codes)
        if self._reports or self._failed():
            raise RunError(_cause(self._reports, self._killed(), self._failed()))
        if EXIT_SAVED in codes:  # a worker was signalled directly, and has reported it
            sys.exit(EXIT_SAVED)

    @contextmanager
    def _store(self) -> Iterator[tuple[str, int]]:
        """Yield address and port of a rendezvous store that outlives any worker."""
        address = _loopback()
        store = self._warm.fork("dzero.launch.worker:host_store", address, name="dzero store", silent=True)
        event = self._warm.event(of=store)
        if not isinstance(event, ForkMessage):
            said = event.output.strip() if event is not None else ""
            raise RunError(f"the store in which workers meet did not start on {address}: {said or event}")
        self._store_fork = store
        try:
            yield address, event.value
        finally:
            self._warm.signal(store, signal.SIGKILL)
            if self._store_fork is not None:
                self._warm.event(STORE_S, of=store)

    def _wait(self) -> None:
        """Wait until all workers have ended; after a failure, end the others within `LEAVE_S`."""
        kill_s, passed_on, ending = math.inf, False, False
        while self._running:
            event = self._warm.event(POLL_S)
            if isinstance(event, ForkMessage) and event.number in self._running:
                self._reports.append(event.value)
            elif isinstance(event, ForkExit) and event.number == self._store_fork:
                self._store_fork = None
                print(
                    "the store in which workers meet was killed: a rank that hangs will not be named", file=sys.stderr
                )
            elif isinstance(event, ForkExit) and event.number in self._running:
                self._running.remove(event.number)
                self._ended[self._ranks[event.number]] = event
            asked = self._signals.asked
            if asked and not passed_on:
                passed_on = True
                self._send(signal.SIGINT if asked[0] == signal.SIGINT else signal.SIGTERM)
                kill_s = min(kill_s, time.monotonic() + self._save_s + STOP_S)
            insists, self._signals.insisted = self._signals.insisted, False
            if insists or (not ending and (self._reports or self._failed())):
                ending = True
                kill_s = time.monotonic() + (UNWIND_S + 1 if self._signals.asked else LEAVE_S)
                self._send(signal.SIGTERM)
            if time.monotonic() > kill_s:
                self._send(signal.SIGKILL)

    def _killed(self) -> dict[int, tuple[int, ForkExit]]:
        """Return process id and exit of each rank that was killed, but not by this launcher."""
        return {
            rank: (self._warm.pids[fork], self._ended[rank])
            for fork, rank in self._ranks.items()
            if self._ended[rank].code < 0 and (fork, -self._ended[rank].code) not in self._sent
        }

    def _failed(self) -> dict[int, ForkExit]:
        return {rank: ended for rank, ended in sorted(self._ended.items()) if ended.code not in (0, EXIT_SAVED)}

    def _send(self, number: int) -> None:
        for fork in self._running:
            self._warm.signal(fork, number)
        self._sent |= {(fork, number) for fork in self._running}


class _Signals:
    """Records signals to the launcher while workers run; `_Workers` acts on them."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.insisted = False
        self._first_s = 0.0

    def __enter__(self) -> _Signals:
        self._before = {
            number: signal.signal(number, self._take)
            for number in PASSED_ON
            if signal.getsignal(number) is not signal.SIG_IGN  # as nohup and background jobs set it
        }
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _: FrameType | None) -> None:
        now_s = time.monotonic()
        if not self.asked:
            self._first_s = now_s
        elif now_s - self._first_s > SAME_S:
            self.insisted = True
        self.asked.append(number)


def _loopback() -> str:
    """Return this machine's loopback address for IPv4, or where there is none, for IPv6."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.create_server((address, 0), family=family):
                return address
        except OSError:
            continue
    raise RunError("workers meet at 127.0.0.1 or ::1, and this machine has neither: bring its loopback interface up")


def _environment(rank: int, workers: int, address: str, port: int) -> Mapping[str, str]:
    """Return torchrun's variables for a worker; on one machine gloo needs only the loopback interface."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }


def _leave(number: int, *, saved: bool) -> NoReturn:
    """Report how the run ended, and exit."""
    how = "the run is saved, and resume=auto goes on" if saved else "the workers were ended"
    print(f"stopped by {signal.Signals(number).name}; {how}", file=sys.stderr)
    sys.exit(EXIT_SAVED if saved else 128 + number)


def _cause(
    reports: Sequence[WorkerFailure], killed: Mapping[int, tuple[int, ForkExit]], ended: Mapping[int, ForkExit]
) -> str:
    """Return why the run failed: a worker that was killed by a signal from elsewhere, else the earliest report.

    `killed` has process id and exit of each such rank, and `ended` the exit of every rank that failed.
    """
    for rank, (pid, end) in killed.items():
        name = signal.Signals(-end.code).name
        hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
        tail = f"\nits last output:\n{end.output.rstrip()}" if end.output.strip() else ""
        return f"rank {rank} (pid {pid}) was killed by {name}{hint}; the other workers were ended{tail}"
    if not reports:
        codes = {rank: end.code for rank, end in ended.items()}
        tails = [f"\nrank {rank}'s last output:\n{end.output.rstrip()}" for rank, end in ended.items() if end.output]
        return f"workers ended without a report; exit codes by rank: {codes}{''.join(tails[:1])}"
    first = min(reports, key=lambda report: report.time_ns)
    if first.traceback is None:
        return first.message
    return f"rank {first.rank} failed; the other workers were ended\n{first.traceback}"
