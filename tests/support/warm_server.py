"""The server of warm_python.py: a fork for each request, which runs its words as an interpreter would.

python warm_server.py DESCRIPTOR PATH     until stdin ends, which is when the tests have ended
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import os
import random
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import processes
import warm_python

MODULES = (
    *(f"dzero.{name}" for name in ("cli.plan", "cli.checkpoints", "launch.fork_server", "plan.preflight")),
    *(f"dzero.{name}" for name in ("monitor.tensorboard", "plan.picture", "trainer.trainer")),
    *("dzero.integrations.transformers", "accelerate", "peft"),
)
AT = sys.argv[2]
PR_SET_SECUREBITS, SECBIT_NOROOT, CAPABILITY_VERSION_3 = 28, 1, 0x20080522


def serve() -> None:
    """Fork for whoever asks."""
    listening = socket.socket(fileno=int(sys.argv[1]))
    for module in MODULES:
        import_module(module)
    gc.collect()
    gc.freeze()
    with selectors.DefaultSelector() as waiting:
        waiting.register(0, selectors.EVENT_READ, None)
        waiting.register(listening, selectors.EVENT_READ, None)
        while True:
            for key, _ in waiting.select():
                if key.fileobj == 0:
                    return
                if key.fileobj is listening:
                    asking, _ = listening.accept()
                    message, files, _, _ = socket.recv_fds(asking, 1 << 20, 3)
                    pid = os.fork()
                    if not pid:
                        become(json.loads(message), files)
                    for file in files:
                        os.close(file)
                    asking.send(str(pid).encode())
                    waiting.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, asking))
                else:
                    pid, asking = key.data
                    waiting.unregister(key.fileobj)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with suppress(OSError):  # nobody waits for it any more
                        asking.send(str(code).encode())
                    asking.close()


def become(request: dict[str, Any], files: list[int], keep: Sequence[int] = ()) -> NoReturn:
    """Run the words of a request, from the start of an interpreter to its end."""
    if request["session"]:
        os.setsid()
    _take(files, keep)
    os.environ.clear()
    os.environ.update(request["env"])
    os.environ[warm_python.AT] = AT
    os.chdir(request["cwd"])
    if tag := os.environ.get(processes.TAG):  # /proc shows the environment of the server
        os.set_inheritable(os.memfd_create(tag), True)
    run(request["words"])


def _take(files: list[int], keep: Sequence[int]) -> None:
    """Have files as stdin, stdout and stderr, and no others but those to keep."""
    own = [os.dup(file) for file in files]  # one of them may be another's place
    for fd, file in enumerate(own):
        os.dup2(file, fd)
    before = 2
    for fd in [*sorted(keep), 1 << 16]:
        os.closerange(before + 1, fd)
        before = fd


def run(words: list[str]) -> NoReturn:
    """Run words of a command line in this fork, whose files, folder and environment are as they should be."""
    code = 1
    try:
        _renew()
        _main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    finally:
        _end(code)


def _renew() -> None:
    """What an interpreter does at its start, and a fork does not."""
    import numpy as np
    import torch

    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(  # type: ignore[union-attr]
            line_buffering=stream is sys.stderr or os.isatty(stream.fileno()),
            write_through=bool(os.environ.get("PYTHONUNBUFFERED")),
        )
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    random.seed()
    np.random.seed()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
        # In a child that this process forks, torch makes its pool of threads anew at the first use, which its first two
        # threads could both be: one of them would raise "Invalid thread pool!".
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(int(threads)))
    for number in (signal.SIGHUP, signal.SIGQUIT):  # as in a terminal, though the tests may run in the background
        signal.signal(number, signal.SIG_DFL)
    for package in os.environ.pop(warm_python.WITHOUT, "").split():
        parts = [name for name in sys.modules if name.startswith(f"{package}.")]
        sys.modules.update(dict.fromkeys([package, *parts]))  # to import one is then a ModuleNotFoundError
    if os.environ.pop(warm_python.AS_A_USER, ""):
        _obey_permissions()
    subprocess.Popen = Forking  # type: ignore[misc]


def _obey_permissions() -> None:
    """Take from root, and from what it starts, the power to pass over the permissions of files."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def _main(words: list[str]) -> None:
    path = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    what, *rest = words
    sys.path[:1] = [{"-c": "", "-m": os.getcwd()}.get(what, str(Path(what).absolute().parent)), *path]
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(sys.modules["__main__"]))  # noqa: S102 (the test's)
    elif what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(what, run_name="__main__")


def _end(code: int) -> NoReturn:
    """What an interpreter does at its end."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(code)


class Forking(warm_python.Popen):
    """Forks by itself what gets descriptors, as the launcher's warm process does, which asks who its parent is."""

    def _start(self, request: dict[str, Any], files: list[int], pass_fds: list[int]) -> bool:
        if not pass_fds:
            return super()._start(request, files, pass_fds)
        if threading.active_count() > 1:
            return False
        self.pid = os.fork()
        if not self.pid:
            become(request, files, pass_fds)
        return True


if __name__ == "__main__":
    serve()
