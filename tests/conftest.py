"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """gloo workers for the whole session: `pool.run(fn, ranks, *args)` gives the results in rank order."""
    with Pool() as workers:
        yield workers
