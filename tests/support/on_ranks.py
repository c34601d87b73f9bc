"""A test that runs on ranks of the pool, and says on each of them what is wrong.

    @on_ranks(2)
    def test_no_bit_differs(rank: int, ranks: int, tmp_path: Path) -> list[str]:

Each rank runs the body, with the fixtures and parameters that it names, and returns what is wrong, or nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def on_ranks(count: int | None = None, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a test of a function of a rank, the number of ranks, and fixtures. options: of `Pool.run`.

    count: how many ranks; None where `ranks` is a parameter of the test.
    """

    def decorate(of_rank: Callable[..., Any]) -> Callable[..., Any]:
        _, ranks, *given = inspect.signature(of_rank).parameters.values()

        @functools.wraps(of_rank)
        def test(*in_a_worker: Any, **fixtures: Any) -> Any:
            if in_a_worker:
                return of_rank(*in_a_worker)
            many = fixtures["ranks"] if count is None else count
            found = fixtures["pool"].run(test, many, *(fixtures[each.name] for each in given), **options)
            wrong = {rank: each for rank, each in enumerate(found) if each}
            assert wrong == {}, f"wrong by rank: {wrong}"
            return None

        pool = inspect.Parameter("pool", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        asked = [pool, *([ranks] if count is None else []), *given]
        test.__signature__ = inspect.Signature(asked, return_annotation=None)  # type: ignore[attr-defined]
        return test

    return decorate
