"""Every process that a command of a test starts, in whatever session and under whatever parent, by its environment."""

from __future__ import annotations

import os
import signal
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TAG = "DZERO_TEST_COMMAND"


class Process(NamedTuple):
    """A process id, its name as ps shows it, its parent, and its command line."""

    pid: int
    name: str
    parent: int
    words: str


def new_tag() -> dict[str, str]:
    """An environment variable that a command and all that it starts have, and nobody else."""
    return {TAG: uuid.uuid4().hex}


def listen() -> None:
    """Take signals as a command in a terminal does, though the tests may run in the background; for preexec_fn."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


def tagged(tag: dict[str, str]) -> list[Process]:
    """The living processes of a command; zombies (which nobody reaps in a container) left out."""
    wanted = f"{TAG}={tag[TAG]}".encode()
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            if state != "Z" and (
                wanted in (stat.parent / "environ").read_bytes().split(b"\0") or _holds(stat.parent, tag)
            ):
                words = (stat.parent / "cmdline").read_text()
                found.append(Process(int(stat.parent.name), name, int(parent), words))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return sorted(found)


def _holds(process: Path, tag: dict[str, str]) -> bool:
    """Whether a process has the file by which warm_server.py tags forks, whose environment is not to be seen."""
    for each in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            if tag[TAG] in os.readlink(each):
                return True
    return False
