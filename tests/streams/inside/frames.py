"""Which lines of code led here: for people who read of a race, and to find the waits of dzero/ one by one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import dzero

PACKAGE = str(Path(dzero.__file__).parent)
SEAM = str(Path(PACKAGE) / "streams.py")
HERE = str(Path(__file__).parent)
FSDP = "_fully_shard"
TOLD = 3
"""Frames that a report shows."""


class Site(NamedTuple):
    """A call in dzero/: its file below the package, its line, and what it is."""

    file: str
    line: int
    kind: str


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def where_called() -> str:
    """Return the innermost lines of dzero, FSDP2 or a test that led here, the innermost first."""
    found: list[str] = []
    for frame in _frames():
        name = frame.f_code.co_filename
        if name.startswith(HERE) and Path(name).name in ("simulation.py", "kernels.py", "operators.py", "memory.py"):
            continue
        if name.startswith(PACKAGE) and name != SEAM:
            found.append(f"{name[len(PACKAGE) - 5 :]}:{frame.f_lineno}")
        elif FSDP in name or name.startswith(HERE):
            found.append(f"{Path(name).name}:{frame.f_lineno}")
        if len(found) == TOLD:
            break
    return " < ".join(found) or "somewhere"


def site_of_caller(kind: str) -> Site | None:
    """Return the call in dzero/ that asked for a wait; None where FSDP2, torch or a test did."""
    for frame in _frames():
        name = frame.f_code.co_filename
        if name == SEAM or (name.startswith(HERE) and "scenario" not in name and "test_" not in name):
            continue
        if not name.startswith(PACKAGE):
            return None
        return Site(name[len(PACKAGE) + 1 :], frame.f_lineno, kind)
    return None
