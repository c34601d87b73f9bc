"""Signals that ask a run to stop: it finishes the step, saves, and exits with `EXIT_SAVED`.

They are SIGTERM, SIGINT, and SIGHUP unless it is ignored (`nohup` ignores it).

    signal              effect
    first               `asked` is set. All ranks learn of it in the next step, and stop after the same step.
    another within 1 s  None: a terminal and a launcher both pass on the same request.
    second              The process exits with 128 + signal.
    none                If the run is not saved by the deadline, the process exits with 128 + signal.

A thread counts the signals, because Python runs handlers in the main thread only, which may be blocked in a collective.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

EXIT_SAVED = 75
"""Exit code of a stopped and saved run (EX_TEMPFAIL of sysexits.h: try again). resume=auto continues the run."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SAME_S = 1.0
UNWIND_S = 3.0


class StopRequest:
    """Context that records signals which ask this process to stop; `asked` is the first one.

    The process has `deadline_s` seconds to save after it. With None, signals are left as they are.
    """

    def __init__(self, deadline_s: float | None) -> None:
        self._deadline_s = deadline_s
        self.asked: signal.Signals | None = None
        self._asked_s, self._at_once, self._leaving = 0.0, False, False
        self._done = threading.Event()
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        if self._before[signal.SIGHUP] is signal.SIG_IGN:
            del self._before[signal.SIGHUP]
        self._ends: tuple[int, int] | None = None

    def __enter__(self) -> StopRequest:
        if self._deadline_s is not None:
            self._ends = os.pipe()
            os.set_blocking(self._ends[1], False)
            signal.set_wakeup_fd(self._ends[1], warn_on_full_buffer=False)
            threading.Thread(target=self._listen, args=(self._ends[0],), name="signals", daemon=True).start()
            for number in self._before:
                signal.signal(number, self._in_main_thread)
        return self

    def __exit__(self, *_: object) -> None:
        if self._ends is None:
            return
        signal.set_wakeup_fd(-1)
        for number, before in self._before.items():
            signal.signal(number, pass_over if self._done.is_set() else before)
        os.close(self._ends[1])  # ends the thread

    def saved(self) -> None:
        """Disarm the deadline and further signals, because the run is saved."""
        self._done.set()

    def _in_main_thread(self, number: int, _: FrameType | None) -> None:
        if self._at_once and not self._leaving and not self._done.is_set():
            self._leaving = True
            sys.exit(128 + number)  # runs every `finally`

    def _listen(self, fd: int) -> None:
        while data := os.read(fd, 1):
            if data[0] in self._before:
                self._count(signal.Signals(data[0]))
        os.close(fd)

    def _count(self, number: signal.Signals) -> None:
        if self.asked is None:
            self._asked_s, self.asked = time.monotonic(), number
            assert self._deadline_s is not None
            _after(self._deadline_s, self._end, f"not saved within checkpoint.deadline_s={self._deadline_s:g}", number)
        elif time.monotonic() - self._asked_s > SAME_S and not self._at_once:
            self._at_once = True
            _after(UNWIND_S, self._end, "ended at once by a second signal", number)
            signal.raise_signal(number)  # the handler may have run before `_at_once` was set

    def _end(self, why: str, number: signal.Signals) -> None:
        if not self._done.is_set():
            print(f"{number.name}: {why}", file=sys.stderr, flush=True)
            os._exit(128 + number)


def pass_over(number: int, _: FrameType | None) -> None:
    """Ignore a signal, also a pending one, for which Python prints a traceback if the handler is SIG_IGN."""


def _after(seconds: float, do: object, *args: object) -> None:
    timer = threading.Timer(seconds, do, args)  # type: ignore[arg-type]
    timer.daemon = True
    timer.start()
