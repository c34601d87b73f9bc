"""How many steps a comparison with one process takes: 20 for one run of each kind of mesh, and for all with `-m slow`;
otherwise as few as show a wrong gradient, norm or update."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import Any

import pytest

SHORT, LONG = 5, 20


def of_lengths(runs: Iterable[Any], kind_of: Callable[[Any], Hashable], more: Iterable[Any] = ()) -> list[Any]:
    """Parameters of a test. runs: dataclasses with `steps`; more: those that are slow at any length."""
    seen, found = set[Hashable](), list[Any]()
    for run in runs:
        whole = replace(run, steps=LONG)
        found += [replace(run, steps=SHORT), slow(whole)] if kind_of(run) in seen else [whole]
        seen.add(kind_of(run))
    return [*found, *(slow(replace(run, steps=LONG)) for run in more)]


def slow(run: Any) -> Any:
    return pytest.param(run, marks=pytest.mark.slow)
