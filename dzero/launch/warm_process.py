"""A process that imports what a run needs while the launcher reads the command line, and then forks every worker.

This is the launcher's side; what the process itself does is in fork_server.py.

    launcher (no torch)                      warm process                        its forks
    reads and checks the settings            imports torch and the trainer
    Warm.call(...), Warm.fork(...)   -->     forks                        -->    runs a function by its name
    events: what a fork says, how it ended   <--  passes on               <--    says; ends

So torch is imported once, not by every worker in turn, and while the settings are read. The warm process runs no code
of a run itself: it has one thread and has touched no device, which is what makes its forks safe. It leaves the
terminal's session with all its forks, so Ctrl-C reaches the launcher alone, and a terminal stops nobody for writing.

    who dies           what happens
    the launcher       the kernel kills the warm process (PR_SET_PDEATHSIG), and so its forks
    the warm process   the kernel kills its forks; the launcher reads the end of the channel
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Pipe
from types import TracebackType
from typing import Any

from dzero.errors import RunError

PRELOADED = ("dzero.trainer.trainer", "dzero.plan.preflight")
CLOSE_S = 0.5
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the launcher answers, and passes on where they concern a fork."""
SERVE = (
    "import sys; fd, pid, *sys.path = sys.argv[1:]; "
    "from dzero.launch.fork_server import serve; serve(int(fd), int(pid))"
)


@dataclass(frozen=True, kw_only=True)
class Fork:
    """A request to run `function(*args, say)`, by its name `module:function`; `say` sends a value to the launcher.

    `name`: of the process, up to 15 bytes, as ps shows it. `silent`: keep its output away from the launcher's; the end
    of it comes with `ForkExit`.
    """

    number: int
    function: str
    args: tuple[Any, ...]
    env: Mapping[str, str]
    name: str
    silent: bool


@dataclass(frozen=True)
class ForkMessage:
    """A value that a fork passed to `say`."""

    number: int
    value: Any


@dataclass(frozen=True)
class ForkExit:
    """The end of a fork: its exit code (negative for a signal), and the end of its output where it is silent."""

    number: int
    code: int
    output: str = ""


@dataclass(frozen=True)
class ForkSignal:
    """A request to send a signal to a fork; nothing where it has ended."""

    number: int
    signal: int


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The reason why a worker failed. `traceback`: None for an error whose message is all that the user needs."""

    rank: int
    time_ns: int
    message: str
    traceback: str | None


class WarmProcessLost(RunError):
    """The warm process ended before the launcher did."""


class WarmProcess:
    """The launcher's side: starts the warm process at once, and has it fork. Use as a context manager."""

    def __init__(self, modules: Sequence[str] = PRELOADED) -> None:
        self._forks, self._events = 0, deque[ForkMessage | ForkExit]()
        self._cause: str | None = None
        self.pids: dict[int, int] = {}
        try:
            self._channel, theirs = Pipe()
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", SERVE, str(theirs.fileno()), str(os.getpid()), *sys.path],
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    stdin=subprocess.DEVNULL,
                )
        except OSError as error:
            raise RunError(no_more_processes(error)) from error
        self._channel.send(tuple(modules))

    def __enter__(self) -> WarmProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._channel.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # it is still importing, say
            self._process.kill()
            self._process.wait()

    def fork(
        self, function: str, *args: Any, name: str, env: Mapping[str, str] | None = None, silent: bool = False
    ) -> int:
        """Run a function in a new process; return its number, by which `event` tells of it."""
        number, self._forks = self._forks, self._forks + 1
        self._send(Fork(number=number, function=function, args=args, env=env or {}, name=name, silent=silent))
        return number

    def signal(self, number: int, which: int) -> None:
        """Send a signal to a fork, unless it has ended."""
        self._send(ForkSignal(number, which))

    def event(self, timeout_s: float | None = None, of: int | None = None) -> ForkMessage | ForkExit | None:
        """Return what happened next, or None after `timeout_s` seconds without. of: to this fork only.

        Raises:
            WarmLost: The warm process is gone, and all forks with it.
        """
        for kept in self._events:
            if of in (None, kept.number):
                self._events.remove(kept)
                return kept
        while self._channel.poll(timeout_s):
            found = self._receive()
            if isinstance(found, ForkMessage | ForkExit):
                if of in (None, found.number):
                    return found
                self._events.append(found)
        return None

    def call(self, function: str, *args: Any) -> Any:
        """Run a function in a process of its own and return its result.

        Raises:
            RunError: What the function raised as one. An exception of another kind has been printed with its traceback
                then, and this one says that it failed.
        """
        number = self.fork("dzero.launch.fork_server:answer", function, args, name="dzero check")
        answer: ForkMessage | None = None
        while not isinstance(found := self.event(of=number), ForkExit):
            assert isinstance(found, ForkMessage)
            answer = found
        if answer is None:
            raise RunError(f"{function} ended with exit code {found.code} and no answer; see above")
        is_error, value = answer.value
        if is_error:
            raise RunError(value)
        return value

    def _send(self, request: Fork | ForkSignal) -> None:
        try:
            self._channel.send(request)
        except OSError as error:
            raise self._lost() from error

    def _receive(self) -> Any:
        try:
            found = self._channel.recv()
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if isinstance(found, str):  # it could not do what it was told to, and has left
            self._cause = found
            raise self._lost()
        if isinstance(found, tuple):
            self.pids[found[0]] = found[1]
        return found

    def _lost(self) -> WarmProcessLost:
        """Return why the warm process is gone: what it said last, else how it ended."""
        with suppress(EOFError, OSError):
            while self._cause is None:
                found = self._channel.recv()
                self._cause = found if isinstance(found, str) else None
        if self._cause is not None:
            return WarmProcessLost(self._cause)
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = " (the system does that when memory runs out)" if code == -signal.SIGKILL else ""
        return WarmProcessLost(
            f"the process that starts the workers (pid {self._process.pid}) {how}{hint}; so did the workers"
        )


def no_more_processes(error: OSError) -> str:
    """Return the message for a process, or a descriptor for it, that the system did not give."""
    limits = "lower launch.workers, or raise the limits of this user (ulimit -u, ulimit -n)"
    return f"the system starts no more processes: {error.strerror}; {limits}"


def found(function: str) -> Callable[..., Any]:
    """Import a function by its name, `module:function`."""
    module, _, name = function.partition(":")
    target: Callable[..., Any] = getattr(import_module(module), name)
    return target
