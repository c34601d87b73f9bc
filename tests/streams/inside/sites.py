"""Every wait, record and held reference of dzero/ that orders streams or threads, found in its source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from frames import PACKAGE, Site

PACKAGES = ("comm", "zero", "offload", "optim", "parallel", "data", "trainer")
SEAM = {"record_event", "wait_event", "wait_stream", "synchronize", "record_stream", "synchronize_device"}
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


class Call(NamedTuple):
    """A call in dzero/: `name` tells it apart from the others, whatever the line that it is on."""

    name: str
    site: Site


def calls() -> list[Call]:
    """Return all of them."""
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
    if owner == "streams" and name in SEAM:
        holds = any(keyword.arg == "holding" for keyword in call.keywords)
        return ("wait", "hold") if holds else KINDS.get(name, ("wait",))
    if owner.endswith("loans"):
        return LOANS.get(name, ())
    if name in OF_A_UNIT or (name == "synchronize" and owner != "streams"):
        return ("wait",)
    is_of_executor = name in OF_AN_EXECUTOR and (owner.endswith("executor") or owner == "self")
    return ("wait",) if name in METHODS or is_of_executor else ()
