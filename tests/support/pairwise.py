"""Few combinations in which every pair of values occurs: greedy, deterministic."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs(row: Row) -> set[Pair]:
    """Every pair of settings in a combination."""
    return set(itertools.combinations(row.items(), 2))


def cover(
    factors: Mapping[str, Sequence[Any]],
    allowed: Callable[[Row], bool],
    *,
    cost: Callable[[Row], float] = lambda _: 1.0,
    tries: int = 60,
) -> list[Row]:
    """Allowed combinations in which each pair occurs that occurs in any allowed one found by drawing.

    cost: of a combination; the most new pairs for it are taken first.
    """
    draw = random.Random(0)

    def drawn(fixed: Row) -> Row | None:
        for _ in range(2000):
            row = {name: fixed.get(name, draw.choice(values)) for name, values in factors.items()}
            if allowed(row):
                return row
        return None

    every = [
        ((a, x), (b, y)) for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2) for x in xs for y in ys
    ]
    missing = dict.fromkeys(pair for pair in every if drawn(dict(pair)) is not None)
    rows: list[Row] = []
    while missing:
        candidates = [row for _ in range(tries) if (row := drawn(dict(next(iter(missing))))) is not None]
        best = max(candidates, key=lambda row: len(pairs(row) & missing.keys()) / cost(row))
        rows.append(best)
        for pair in pairs(best):
            missing.pop(pair, None)
    return rows
