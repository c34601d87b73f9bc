"""Workers for a plain `python train.py`: forks of one warm process (warm_process.py), one per GPU, or two on a CPU.

This process starts them, waits, and says how it ended; it needs no torch for that. Under torchrun (RANK is set) nothing
is launched: the process joins the group it is given.

    what happens               what the user sees          how it ends
    a worker raises            its traceback, once; of a   it reports before it leaves the group: the earliest report
                               RunError the message        is the cause; the others have `LEAVE_S` to leave
    a worker is killed         its rank and the signal     the same
    a worker hangs             its rank, and where all     the others report (watch.py); the launcher kills it
                               ranks are
    Ctrl-C, SIGTERM,           the signal, and what was    the workers get it (SIGTERM for the last two): those that
    SIGHUP, SIGQUIT            saved                       save finish the step and do so (stopping.py); a second one
                                                           ends all; who is still there after the time to save
                                                           and `STOP_S` is killed
    the launcher is killed     nothing                     the kernel kills the workers
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
from typing import Any, NoReturn, Protocol

from dzero.errors import RunError
from dzero.launch.config import LauncherConfig, launched
from dzero.launch.signals import EXIT_SAVED, SAME_S, UNWIND_S
from dzero.launch.warm_process import PASSED_ON, ForkExit, ForkMessage, WarmProcess, found

POLL_S, STORE_S = 0.1, 1.0
LEAVE_S = 2.0
"""What the other workers have to leave, once one has failed or was killed. torch would give them 30."""
STOP_S = 10.0
"""What workers have to leave after a signal, beside the time to save; one that hangs in a library hears none."""


class LaunchedRun(Protocol):
    """The part of a run's configuration that a launch reads."""

    @property
    def launch(self) -> LauncherConfig:
        """How workers are started, and how long they wait for each other."""


def start(
    entry: Callable[..., None] | str,
    config: LaunchedRun,
    run_folder: Path,
    *,
    workers: int,
    warm: WarmProcess | None = None,
    save_s: float = 0.0,
) -> None:
    """Run `entry(config, run_folder, device)` here where this is a worker already, else in workers of our own.

    Args:
        entry: The function, or its name `module:function`; every worker imports it by that.
        config: The run's settings, the entry's first argument.
        run_folder: Where the run writes.
        workers: How many to start; nothing under torchrun.
        warm: The warm process that forks them; None for one that is started and ended here.
        save_s: Seconds that workers may take to save when a signal asks them to stop.

    Raises:
        RunError: A worker failed; the message says which and why.
        SystemExit: A signal ended it, with 128 + the signal, as shells do, or `EXIT_SAVED` where the run was saved.
    """
    name = entry if isinstance(entry, str) else f"{entry.__module__}:{entry.__qualname__}"
    if launched():
        found("dzero.launch.worker:join")(found(name), config, run_folder)
        return
    with nullcontext(warm) if warm is not None else WarmProcess() as forks, _Signals() as signals:
        _Workers(forks, signals, save_s).run(name, config, run_folder, workers)


class _Workers:
    """The workers of one run, by rank, until all have ended."""

    def __init__(self, warm: WarmProcess, signals: _Signals, save_s: float) -> None:
        self._warm, self._signals, self._save_s = warm, signals, save_s
        self._ranks: dict[int, int] = {}
        self._running: set[int] = set()
        self._ended: dict[int, ForkExit] = {}
        self._reports: list[Any] = []
        self._sent: set[tuple[int, int]] = set()
        self._passed_on = self._ending = False
        self._store_fork: int | None = None

    def run(self, entry: str, config: LaunchedRun, run_folder: Path, workers: int) -> None:
        """Start all, wait for all, and say how it ended."""
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
        if EXIT_SAVED in codes:  # a signal to a worker, which has told it
            sys.exit(EXIT_SAVED)

    @contextmanager
    def _store(self) -> Iterator[tuple[str, int]]:
        """Address and port of a store that outlives any worker."""
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
        """Wait until all have ended; those that one that failed leaves behind are ended after `LEAVE_S`."""
        kill_s = math.inf
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
            if self._pass_first_signal_on():
                kill_s = min(kill_s, time.monotonic() + self._save_s + STOP_S)
            if self._insists() or (not self._ending and (self._reports or self._failed())):
                self._ending = True
                kill_s = time.monotonic() + (UNWIND_S + 1 if self._signals.asked else LEAVE_S)
                self._send(signal.SIGTERM)
            if time.monotonic() > kill_s:
                self._send(signal.SIGKILL)

    def _pass_first_signal_on(self) -> bool:
        """Pass on the first signal, which asks the workers to end; return whether that was done just now."""
        asked = self._signals.asked
        if not asked or self._passed_on:
            return False
        self._passed_on = True
        self._send(signal.SIGINT if asked[0] == signal.SIGINT else signal.SIGTERM)
        return True

    def _insists(self) -> bool:
        """Return whether another signal has come after the first."""
        insists, self._signals.insisted = self._signals.insisted, False
        return insists

    def _killed(self) -> dict[int, tuple[int, ForkExit]]:
        """Return process id and end of the ranks that were killed by others than this launcher."""
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
    """Signals to the launcher while workers run: only recorded here, since `_Workers` alone speaks to the workers."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.insisted = False
        self._first_s = 0.0

    def __enter__(self) -> _Signals:
        self._before = {
            number: signal.signal(number, self._take)
            for number in PASSED_ON
            if signal.getsignal(number) is not signal.SIG_IGN  # nohup, and jobs in the background, want it so
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
    """Return this machine's own address, of IPv4 or, where there is none, of IPv6."""
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.create_server((address, 0), family=family):
                return address
        except OSError:
            continue
    raise RunError("workers meet at 127.0.0.1 or ::1, and this machine has neither: bring its loopback interface up")


def _environment(rank: int, workers: int, address: str, port: int) -> Mapping[str, str]:
    """Return torchrun's variables for a worker; gloo needs no other interface than the loopback on one machine."""
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
    """Say how it ended, and do."""
    how = "the run is saved, and resume=auto goes on" if saved else "the workers were ended"
    print(f"stopped by {signal.Signals(number).name}; {how}", file=sys.stderr)
    sys.exit(EXIT_SAVED if saved else 128 + number)


def _cause(reports: Sequence[Any], killed: Mapping[int, tuple[int, ForkExit]], ended: Mapping[int, ForkExit]) -> str:
    """Return why the run failed: a worker that a signal from elsewhere killed, else the earliest report.

    Args:
        reports: What workers said before they left (`dzero.launch.warm_process.WorkerFailure`).
        killed: Process id and end of each rank that was killed, but not by this launcher.
        ended: The end of every rank that failed.
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
    first = min(reports, key=lambda report: int(report.time_ns))
    if first.traceback is None:
        return str(first.message)
    return f"rank {first.rank} failed; the other workers were ended\n{first.traceback}"
