"""Warm process, as the launcher uses it: imports what a run needs while settings are read, then forks every worker.

`launch/fork_server.py` is the code of the process itself.

    launcher (no torch)                      warm process                        its forks
    reads and checks the settings            imports torch and the trainer
    WarmProcess.call, WarmProcess.fork  -->  forks                        -->    run a function by its name
    WarmProcess.event                   <--  passes on                    <--    send messages, and exit

Torch is imported once instead of by every worker, and at the same time the launcher reads the settings. Forks are safe
because the warm process runs no code of a run, has one thread, and uses no device. It leaves the terminal's session
together with its forks, so that Ctrl-C reaches only the launcher, and the terminal does not stop forks that write.

    process that dies   what happens
    launcher            The kernel kills the warm process (PR_SET_PDEATHSIG), and so its forks.
    warm process        The kernel kills its forks. The launcher reads the end of the channel.
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
from typing import Any

from dzero.errors import RunError

PRELOADED = ("dzero.trainer.trainer", "dzero.plan.preflight")
CLOSE_S = 0.5
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Signals that the launcher handles, and passes on if they concern a fork."""
SERVE = (
    "import sys; fd, pid, *sys.path = sys.argv[1:]; "
    "from dzero.launch.fork_server import serve; serve(int(fd), int(pid))"
)


@dataclass(frozen=True)
class Fork:
    """Request to run a function in a fork; `WarmProcess.fork` tells what the fields mean."""

    number: int
    function: str
    args: tuple[Any, ...]
    env: Mapping[str, str]
    name: str
    silent: bool


@dataclass(frozen=True)
class ForkMessage:
    """Value that a fork passed to `say`."""

    number: int
    value: Any


@dataclass(frozen=True)
class ForkExit:
    """Exit code of a fork (negative for a signal), and the last part of its output if it is silent."""

    number: int
    code: int
    output: str = ""


@dataclass(frozen=True)
class ForkSignal:
    """Request to send a signal to a fork; ignored if the fork has ended."""

    number: int
    signal: int


@dataclass(frozen=True)
class WorkerFailure:
    """Reason why a worker failed; `traceback` is None for an error whose message is all that the user needs."""

    rank: int
    time_ns: int
    message: str
    traceback: str | None


class WarmProcessLost(RunError):
    """Error for a warm process that has ended before the launcher."""


class WarmProcess:
    """Context manager that starts the warm process, which imports `modules`, and requests forks from it.

    `pids` has the process ids by the number of the fork.
    """

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

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:  # e.g. it is still importing
            self._process.kill()
            self._process.wait()

    def fork(
        self, function: str, *args: Any, name: str, env: Mapping[str, str] | None = None, silent: bool = False
    ) -> int:
        """Run a function in a new process, and return the number that identifies it in events.

        Args:
            function: Name of the function, `module:function`.
            *args: Its arguments, except the last one, `say`, which sends a value to the launcher.
            name: Name of the process as ps shows it, up to 15 bytes.
            env: Environment variables to set.
            silent: Whether to record its output instead of printing it; the last part comes with `ForkExit`.
        """
        number, self._forks = self._forks, self._forks + 1
        self._send(Fork(number, function, args, env or {}, name, silent))
        return number

    def signal(self, number: int, which: int) -> None:
        """Send the signal `which` to a fork, unless it has ended."""
        self._send(ForkSignal(number, which))

    def event(self, timeout_s: float | None = None, of: int | None = None) -> ForkMessage | ForkExit | None:
        """Return the next event, of any fork or of fork `of`, or None if there is none in time.

        Raise `WarmProcessLost` if the warm process has ended, and all forks with it.
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
        """Run a function in a process of its own, and return its result.

        Raise RunError if the function raised it, or another exception, whose traceback the process has printed.
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
        if isinstance(found, str):  # it failed, and has exited
            self._cause = found
            raise self._lost()
        if isinstance(found, tuple):
            self.pids[found[0]] = found[1]
        return found

    def _lost(self) -> WarmProcessLost:
        """Return the error with the last message of the warm process, or else how it ended."""
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
    """Return the message for a process, or a descriptor for it, that the system refused."""
    limits = "lower launch.workers, or raise the limits of this user (ulimit -u, ulimit -n)"
    return f"the system starts no more processes: {error.strerror}; {limits}"


def found(function: str) -> Callable[..., Any]:
    """Import a function by its name, `module:function`."""
    module, _, name = function.partition(":")
    target: Callable[..., Any] = getattr(import_module(module), name)
    return target
