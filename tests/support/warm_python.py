"""Python processes that tests start are forks of one that has imported torch and dzero: seconds less for each.

`use()` puts `Popen` in the place of `subprocess.Popen`. It starts `python FILE`, `python -c CODE` and
`python -m MODULE` through the server of warm_server.py, with the line's words, folder, environment and files. All else
starts as ever: lines with options of Python or under another program, and those with functions or descriptors to pass
on. A process that must find Python as a user does has `COLD` in its environment.

    tests                      server (warm_server.py)            its fork
    Popen, run, …        -->   forks                       -->    runs the file, module or code as `__main__`
    poll, wait           <--   its exit code               <--    ends as an interpreter does

A fork has a parent that did not ask for it; signals, sessions and what it writes are as those of a child.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

COLD = {"DZERO_TESTS_START_COLD": "1"}
AT = "DZERO_TESTS_WARM"
"""Where the server listens; forks have it too, so that what they start is a fork as well."""
WITHOUT = "DZERO_TESTS_WITHOUT"
"""Packages that a fork does not find, separated by blanks."""
AS_A_USER = "DZERO_TESTS_AS_A_USER"
"""Has a fork obey the permissions of files, also where the tests run as root."""
ROOT = Path(__file__).parents[2]
PLAIN = subprocess.Popen


class Popen(PLAIN):  # type: ignore[type-arg]
    """`subprocess.Popen`, whose Python processes start warm."""

    _socket: socket.socket | None = None

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: bool,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: bool,
        p2cread: int,
        p2cwrite: int,
        c2pread: int,
        c2pwrite: int,
        errread: int,
        errwrite: int,
        *rest: Any,
    ) -> None:
        words = None if shell or isinstance(args, str | bytes | os.PathLike) else [os.fspath(word) for word in args]
        environ = dict(os.environ if env is None else env)
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        if preexec_fn is None and executable is None and is_plain(words, environ):
            assert words is not None
            folder = os.getcwd() if cwd is None else os.fspath(cwd)
            request = {"words": words[1:], "cwd": folder, "env": environ, "session": bool(rest[-2])}
            files = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
            if os.path.isdir(folder) and self._start(request, files, [*pass_fds]):
                self._child_created = True
                self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
                return
        given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
        super()._execute_child(*given, *pipes, *rest)  # type: ignore[misc]

    def _start(self, request: dict[str, Any], files: list[int], pass_fds: list[int]) -> bool:
        """Start it warm, and say whether that was possible."""
        if pass_fds:
            return False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.connect(_listening())
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        self.pid = int(self._socket.recv(64))
        return True

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._socket is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc,no-any-return]
        if self.returncode is None and select.select([self._socket], [], [], 0)[0]:
            self._take()
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self._socket is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            if not select.select([self._socket], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self._take()
        return self.returncode

    def _take(self) -> None:
        assert self._socket is not None
        told = self._socket.recv(64)
        self.returncode = int(told) if told else -9
        self._socket.close()


IMPORTED_WITH = (
    *("ATEN_", "CUDA_", "HF_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "ONEDNN_", "PYTHON", "TRANSFORMERS_", "TRITON_"),
)
"""Beginnings of variables that are read when Python starts, or when a library is imported."""
READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED"}


def is_plain(words: list[str] | None, env: dict[str, str]) -> bool:
    """Whether the line is Python with a file, a module or code and no options, which would import what a fork has."""
    if words is None or len(words) < 2 or words[0] != sys.executable or COLD.keys() & env.keys():
        return False
    changed = {key for key, _ in env.items() ^ os.environ.items() if key.startswith(IMPORTED_WITH)}
    path = {*env.get("PYTHONPATH", "").split(os.pathsep)} - {"", *sys.path, str(ROOT)}
    return not path and changed <= READ_LATER and (words[1] in ("-c", "-m") or not words[1].startswith("-"))


def use() -> None:
    """Start Python warm from here on, in this process."""
    subprocess.Popen = Popen  # type: ignore[misc]


def share() -> None:
    """Start the server now, for this process and all that it starts."""
    os.environ[AT] = _listening()


@functools.cache
def _listening() -> str:
    """Where the server listens: this process's, one that is shared, or that of which it is a fork."""
    if AT in os.environ:
        return os.environ[AT]
    folder = TemporaryDirectory()
    path = str(Path(folder.name, "warm"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        line = [sys.executable, str(Path(__file__).with_name("warm_server.py")), str(listening.fileno()), path]
        server = PLAIN(line, stdin=subprocess.PIPE, pass_fds=[listening.fileno()], start_new_session=True)
    assert server.stdin is not None

    def end() -> None:
        server.stdin.close()  # type: ignore[union-attr]
        server.wait()
        folder.cleanup()

    atexit.register(end)
    return path
