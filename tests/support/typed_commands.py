"""Commands typed as a user types them, without the seconds that a process of its own takes to import torch.

`typed("train.py", "zero.stage=5", cwd=folder)` is `python train.py zero.stage=5` in that folder, and
`typed("-m", "dzero", "plan")` is `python -m dzero plan`. A server (typed_server.py) has imported what both import, and
forks a process for each command, which runs the named file or module as `__main__`.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
SECONDS = 240
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HYDRA_FULL_ERROR", "GLOO_SOCKET_IFNAME")

Ended = subprocess.CompletedProcess[str]


def typed(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None, without: Sequence[str] = ()) -> Ended:
    """The command's exit code, stdout and stderr; a command that takes more than `SECONDS` is ended (code 124).

    env: set over the environment of the tests. without: packages as if they were not installed, in this process. The
    permissions of files hold, also where the tests run as root.
    """
    with TemporaryDirectory() as told:
        out, err = Path(told, "out"), Path(told, "err")
        line = [str(word) for word in words]
        paths = {"cwd": str(cwd), "out": str(out), "err": str(err)}
        request = {"words": line, "env": _env(env), "without": [*without], "seconds": SECONDS, **paths}
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(line, code, out.read_text(), err.read_text())


def as_torchrun() -> dict[str, str]:
    """The environment that torchrun gives the only worker of a run."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": "typed"}


def in_a_process(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """The same by a process of its own, as a shell starts it."""
    line = [sys.executable, *(str(word) for word in _absolute([str(word) for word in words]))]
    return subprocess.run(line, cwd=cwd, env=_env(env), capture_output=True, text=True, timeout=SECONDS, check=False)


def refused(ended: Ended, *says: str, code: int = 1) -> str:
    """Assert one paragraph `error: …` with these words, the exit code, and no traceback; return the paragraph."""
    told = ended.stdout + ended.stderr
    assert ended.returncode == code, f"exit code {ended.returncode}:\n{told}"
    assert "Traceback" not in told, told
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, told
    paragraph = ended.stderr[ended.stderr.index("error: ") :]
    for words in says:
        assert words in paragraph, f"{words!r} is not in:\n{paragraph}"
    return paragraph


def _absolute(words: list[str]) -> list[str]:
    return [str(ROOT / words[0]), *words[1:]] if words[0].endswith(".py") else words


def _env(more: Mapping[str, str] | None) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in OTHERS}
    return {**kept, "PYTHONPATH": str(ROOT), **(more or {})}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("typed_server.py")), str(ROOT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_env(None),
    )
    atexit.register(server.kill)
    return server
