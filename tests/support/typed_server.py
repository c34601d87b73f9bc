"""The server of typed_commands.py: one line of JSON in, a command run in a forked process, its exit code out."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(sys.argv[1])
POLL_S = 0.005
TIMED_OUT = 124
PR_SET_SECUREBITS, SECBIT_NOROOT, CAPABILITY_VERSION_3 = 28, 1, 0x20080522


def serve() -> None:
    """Until stdin ends."""
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if not pid:
            _become(request)
        print(_code(pid, float(request["seconds"])), flush=True)


def _code(pid: int, seconds: float) -> int:
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return TIMED_OUT


def _become(request: dict[str, Any]) -> NoReturn:
    """The command itself, to its end as the interpreter would end it."""
    os.setsid()
    with open(os.devnull) as none, open(request["out"], "w") as out, open(request["err"], "w") as err:
        for fd, file in enumerate((none, out, err)):
            os.dup2(file.fileno(), fd)
    sys.stdin = open(os.devnull)  # noqa: SIM115 (the pipe's buffer is the server's)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.modules.update(dict.fromkeys(request["without"]))  # to import one of them is then a ModuleNotFoundError
    _obey_permissions()
    code = 1
    try:
        _run(request["words"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _obey_permissions() -> None:
    """Take from root, and from what it starts, the power to pass over the permissions of files."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_SECUREBITS, SECBIT_NOROOT, 0, 0, 0)
    libc.capset((ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)())


def _run(words: list[str]) -> None:
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [str(ROOT / words[0]), *words[1:]]
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    for name in ("cli.plan", "cli.checkpoints", "plan.preflight", "trainer.trainer"):
        import_module(f"dzero.{name}")  # before the first fork, so that none of them has to
    serve()
