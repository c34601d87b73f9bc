"""Several cells of a test in one run of the pool, which takes longer to set up than a small net to train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pool import Pool

STAGES = [(0,), (1,), (2,), (3,)]


def every(rank: int, ranks: int, function: Callable[..., Any], cells: list[tuple[Any, ...]]) -> list[Any]:
    """The worker's side: `function(rank, ranks, *cell)` of each cell; an error names its cell."""
    found = []
    for cell in cells:
        try:
            found.append(function(rank, ranks, *cell))
        except Exception as error:
            error.add_note(f"in the cell {cell}")
            raise
    return found


def of_cells(pool: Pool, ranks: int, function: Callable[..., Any], cells: Iterable[tuple[Any, ...]]) -> list[list[Any]]:
    """By cell: what `function(rank, ranks, *cell)` returned on each rank."""
    return [list(of_cell) for of_cell in zip(*pool.run(every, ranks, function, [*cells]), strict=True)]


def of_all(pool: Pool, ranks: int, function: Callable[..., Any], cells: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The same in one list: all ranks of the first cell, then those of the next one."""
    return [each for of_cell in of_cells(pool, ranks, function, cells) for each in of_cell]
