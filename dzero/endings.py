"""How a launch ends: reports of workers, signals to the launcher, workers that hang; and what the user is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler

from dzero.errors import RunError, ToldElsewhere
from dzero.stopping import EXIT_SAVED, SAME_S, SIGNALS

POLL_S = 0.1
LINGER_S = 0.5  # a worker that failed because another was killed must outlive the poll that finds the killed one
HUNG_S = 4.0


@contextmanager
def reported(report: Callable[[Exception], None]) -> Iterator[None]:
    """On an exception `report` why, and leave at once: what runs at exit could wait for ranks that never come."""
    try:
        yield
    except Exception as error:
        report(error)
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(LINGER_S)
        os._exit(1)


def to_launcher(private: Path, error: Exception) -> None:
    """As a file for `explain`."""
    rank = os.environ["RANK"]
    text = None if isinstance(error, RunError) else traceback.format_exc()
    report = {"rank": rank, "time_ns": time.time_ns(), "message": str(error), "traceback": text}
    temporary = private / f"{rank}.json"
    temporary.write_text(json.dumps(report))
    temporary.rename(private / f"failed-{rank}.json")


def to_torchrun(error: Exception) -> None:
    """On stderr, at once; and as a file for torchrun's summary."""
    get_error_handler().record_exception(error)
    if not isinstance(error, ToldElsewhere):
        print(f"error: {error}" if isinstance(error, RunError) else traceback.format_exc(), file=sys.stderr)


@contextmanager
def hung_workers_killed(private: Path) -> Iterator[None]:
    """Once a worker has reported why the run ends, the others have `HUNG_S` to leave; torch would give them 30 s."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            if any(private.glob("failed-*.json")):
                over.wait(HUNG_S)
                for worker in multiprocessing.active_children():
                    worker.kill()
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


class LauncherSignals:
    """SIGINT and SIGTERM to the launcher: the first asks the workers to end, a later one ends them.

    A terminal sends Ctrl-C to this process and to its workers; only this one shall answer. Processes inherit the
    signals that the thread which starts them blocks. So the main thread blocks it, another thread takes the delivery,
    and Python runs the handler in the main thread all the same.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._first_s = 0.0
        self._over = threading.Event()

    def __enter__(self) -> LauncherSignals:
        resource_tracker.ensure_running()  # multiprocessing's own helper, whose start would unblock the signal again
        threading.Thread(target=self._over.wait, daemon=True).start()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        self._over.set()

    def _take(self, number: int, _: FrameType | None) -> None:
        workers = multiprocessing.active_children()
        if self.first is None and workers:
            self.first, self._first_s = number, time.monotonic()
            for worker in workers:
                worker.terminate()
        elif self.first is None or time.monotonic() - self._first_s > SAME_S:
            raise SignalException("stopped", signal.Signals(number))

    def leave(self, number: int, *, saved: bool) -> NoReturn:
        """Say how it ended, and do."""
        how = "the run is saved, and resume=auto goes on" if saved else "the workers were ended"
        print(f"stopped by {signal.Signals(number).name}; {how}", file=sys.stderr)
        sys.exit(EXIT_SAVED if saved else 128 + number)


def explain(failed: ChildFailedError, private: Path) -> str:
    """The cause: a worker killed by a signal, else the earliest report."""
    for rank, failure in sorted(failed.failures.items()):
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # SIGTERM is how the launcher ends the others
            name = signal.Signals(-failure.exitcode).name
            hint = " (the system does that when memory runs out)" if name == "SIGKILL" else ""
            return f"rank {rank} (pid {failure.pid}) was killed by {name}{hint}; the other workers were ended"
    reports = [json.loads(path.read_text()) for path in private.glob("failed-*.json")]
    if not reports:
        codes = {rank: failure.exitcode for rank, failure in failed.failures.items()}
        return f"workers ended without a report; exit codes by rank: {codes}"
    first = min(reports, key=lambda report: int(report["time_ns"]))
    if first["traceback"] is None:
        return str(first["message"])
    return f"rank {first['rank']} failed; the other workers were ended\n{first['traceback']}"
