"""Waits, records and held references of dzero/ that order streams or threads: all of them, found in its source, and the
one that led here, or the lines for people who read of a race."""

from __future__ import annotations

import ast
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
PACKAGES = ("comm", "zero", "offload", "optim", "parallel", "data", "trainer")
ORDERING = {"record_event", "wait_event", "wait_stream", "synchronize", "record_stream", "synchronize_device"}
KINDS = {"record_event": ("record",), "record_stream": ("record_stream",)}
"""What is left out of a call of streams.py, where that is not its wait."""
LOANS = {"lend": ("hold", "record"), "make": ("wait",), "clear": ("wait",)}
METHODS = {"wait", "result"}
OF_AN_EXECUTOR = {"wait", "stream_wait", "drain"}
OF_A_UNIT = {"wait_for_update", "await_update"}
"""Waits of a unit for its update (zero/unit.py), each by other waits that are listed too."""
OF_WORKS = {"pending", "coming"}
"""Names of a `_Works` (comm/collectives.py), whose own waits are listed."""
INDIRECT = {"optim/base.py"}
"""Files whose `wait` is another function of dzero/, which waits by calls that are listed."""


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


class Call(NamedTuple):
    """A call in dzero/: `name` tells it apart from the others, whatever the line that it is on."""

    name: str
    site: Site


def calls() -> list[Call]:
    found = []
    for package in PACKAGES:
        for path in sorted((Path(PACKAGE) / package).rglob("*.py")):
            found += [call for call in _calls_of(path) if call.site.file not in INDIRECT]
    return found


def _calls_of(path: Path) -> Iterator[Call]:
    file = str(path.relative_to(PACKAGE))
    for function, node in _functions(ast.parse(path.read_text(encoding="utf-8"))):
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and (kinds := _kinds(call)):
                text = " ".join(ast.unparse(call.func).split())
                for kind in kinds:
                    told = f" ({kind})" if len(kinds) > 1 else ""
                    yield Call(f"{file} {function}: {text}{told}", Site(file, call.lineno, kind))


def _functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Give every outermost function, and method of a class, with its name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _kinds(call: ast.Call) -> tuple[str, ...]:
    """Return what can be left out of a call; nothing of one that orders nothing."""
    function = call.func
    if isinstance(function, ast.Name):
        return ("wait",) if function.id == "wait" else ()
    if not isinstance(function, ast.Attribute):
        return ()
    owner, name = ast.unparse(function.value), function.attr
    if owner in OF_WORKS:
        return ()
    if owner == "streams" and name in ORDERING:
        holds = any(keyword.arg == "holding" for keyword in call.keywords)
        return ("wait", "hold") if holds else KINDS.get(name, ("wait",))
    if owner.endswith("loans"):
        return LOANS.get(name, ())
    if name in OF_A_UNIT or (name == "synchronize" and owner != "streams"):
        return ("wait",)
    is_of_executor = name in OF_AN_EXECUTOR and (owner.endswith("executor") or owner == "self")
    return ("wait",) if name in METHODS or is_of_executor else ()
