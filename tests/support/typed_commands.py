"""Commands typed as a user types them; they start warm, as warm_python.py says.

`typed("train.py", "zero.stage=5", cwd=folder)` is `python train.py zero.stage=5` in that folder, and
`typed("-m", "dzero", "plan")` is `python -m dzero plan`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import warm_python

ROOT = Path(__file__).parents[2]
SECONDS = 240
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HYDRA_FULL_ERROR", "GLOO_SOCKET_IFNAME")

Ended = subprocess.CompletedProcess[str]


def typed(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None, without: Sequence[str] = ()) -> Ended:
    """The command's exit code, stdout and stderr; a command that takes more than `SECONDS` is an error.

    env: set over the environment of the tests. without: packages as if they were not installed, in this process. The
    permissions of files hold, also where the tests run as root.
    """
    how = {warm_python.WITHOUT: " ".join(without), warm_python.AS_A_USER: "yes"}
    return _ended(words, cwd, how | dict(env or {}))


def as_torchrun() -> dict[str, str]:
    """The environment that torchrun gives the only worker of a run."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    return {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "TORCHELASTIC_RUN_ID": "typed"}


def in_a_process(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> Ended:
    """The same from a cold start, as a shell makes it."""
    return _ended(words, cwd, warm_python.COLD | dict(env or {}))


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


def _ended(words: Sequence[str | Path], cwd: Path, more: Mapping[str, str]) -> Ended:
    first, *rest = map(str, words)
    line = [sys.executable, str(ROOT / first) if first.endswith(".py") else first, *rest]
    env = {key: value for key, value in os.environ.items() if key not in OTHERS} | {"PYTHONPATH": str(ROOT), **more}
    return subprocess.run(line, cwd=cwd, env=env, capture_output=True, text=True, timeout=SECONDS, check=False)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
