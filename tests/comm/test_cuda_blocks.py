"""Triton's kernels of payloads in blocks, interpreted on the CPU, against the CPU kernels, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
from adamw_cases import interpret
from block_cases import DTYPES, kernels_differ

from dzero.comm.wire import FORMATS


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function in a process in which Triton interprets kernels."""
    pytest.importorskip("triton")
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=interpret) as process:
        yield lambda function, *args: process.submit(function, *args).result()


def test_the_kernels_have_the_bits_of_the_cpu_kernels(interpreted: Callable[..., Any]) -> None:
    cases = [(code, dtype) for code in FORMATS for dtype in DTYPES]
    assert {case: interpreted(kernels_differ, "cpu", *case) for case in cases} == {case: [] for case in cases}
