"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin for work take the cores from the workers

import pytest
import torch
import torch.distributed as dist
import warm_python
from pool import Pool

warm_python.use()


def pytest_configure(config: pytest.Config) -> None:
    """Workers share a server, and take files in their order: by size, files of a few long tests would come last."""
    config.option.loadscopereorder = False  # pytest-xdist's
    if getattr(config.option, "dist", "no") != "no" and not hasattr(config, "workerinput"):
        warm_python.share()


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """gloo workers for the whole session: `pool.run(fn, ranks, *args)` gives the results in rank order."""
    with Pool() as workers:
        yield workers


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Call a function in a process in which Triton interprets kernels."""
    pytest.importorskip("triton")
    from adamw_cases import interpret

    with ProcessPoolExecutor(1, get_context("spawn"), initializer=interpret) as process:
        yield lambda function, *args: process.submit(function, *args).result()


@pytest.fixture(autouse=True)
def _no_group_is_left() -> Iterator[None]:
    """A process group of a test in this process would be the next test's too."""
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left, "the test left a process group: destroy it"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """What needs a GPU skips itself where there is none."""
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device: `pytest -m gpu` asks for one")


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a function marked `product(keep=n)` the default suite runs n members, evenly spread; the others are `full`."""
    products: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("product") is not None and item.get_closest_marker("slow") is None:
            name = getattr(item, "originalname", item.name)
            products.setdefault((str(item.path), name), []).append(item)
    for members in products.values():
        marker = members[0].get_closest_marker("product")
        assert marker is not None
        keep = marker.kwargs["keep"]
        kept = {index * len(members) // keep for index in range(keep)}
        for index, item in enumerate(members):
            if index not in kept:
                item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Imports and collected tests are never garbage: no collection looks through them again."""
    gc.collect()
    gc.freeze()
