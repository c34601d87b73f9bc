"""Kernels are compiled once per machine, by whichever process comes first, in a folder that is this user's alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numba
import pytest
import torch
from numba.core import caching
from small_runs import ROOT

from dzero.optim import cpu_kernels
from dzero.utils import numba_views

KERNEL = """
import torch
from dzero.comm import host_sum
mine = torch.arange(8, dtype=torch.bfloat16)
mean = torch.empty_like(mine)
host_sum.average(mean, mine, torch.stack([mine, mine * 3]), 0)
stats = host_sum._kernel(wire_bf16=True, output_bf16=True).stats
print(mean.tolist() == (mine * 2).tolist(), sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
"""


def begin(cache: Path) -> subprocess.Popen[str]:
    """A process that uses a kernel, with `cache` as its folder of caches."""
    env = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
    env |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-c", KERNEL], env=env, stdout=subprocess.PIPE, text=True)


def told(process: subprocess.Popen[str]) -> list[str]:
    """Whether the kernel's result is right, and its cache's hits and misses."""
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return output.split()


@pytest.mark.full
def test_kernels_are_compiled_once_and_only_in_a_private_folder(tmp_path: Path) -> None:
    both = [begin(tmp_path) for _ in range(2)]  # at once, on an empty cache
    assert all(told(process)[0] == "True" for process in both)
    (folder,) = (tmp_path / "dzero/kernels").iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    assert told(begin(tmp_path)) == ["True", "1", "0"]

    folder.chmod(0o777)  # others could have put code there
    assert told(begin(tmp_path)) == ["True", "0", "1"]


def test_a_change_of_any_file_of_the_package_makes_another_folder() -> None:
    """A kernel calls functions of other files, whose code numba's own cache does not look at."""
    assert numba_views.PACKAGE == ROOT / "dzero"


def test_variants_that_are_compiled_at_one_time_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """numba numbers the files of a function by its index, so processes that read it at one time take one number."""
    wide, narrow = torch.arange(1000.0), torch.arange(256.0).bfloat16()
    save_index, waiting = caching.IndexDataCacheFile._save_index, list[Callable[[], None]]()

    def save_late(self: caching.IndexDataCacheFile, overloads: dict[object, str]) -> None:
        waiting.append(partial(save_index, self, overloads))
        if len(waiting) == 1:  # as another process would, which has read the index too
            cpu_kernels.sum_squares([wide])
        while waiting:
            waiting.pop(0)()

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(caching.IndexDataCacheFile, "_save_index", save_late)
    monkeypatch.setitem(numba_views.JIT, "cache", True)
    for _ in range(2):  # compiled, then loaded
        cpu_kernels._sum_squares_kernel.cache_clear()
        found = [cpu_kernels.sum_squares([each]).item() for each in (narrow, wide)]
        assert found == [each.double().square().sum().item() for each in (narrow, wide)]
    assert len([*tmp_path.rglob("*.nbc")]) == 2
    monkeypatch.setattr(numba_views, "_digest", lambda: "of other sources")  # in the same folder, if the user chose it
    cpu_kernels._sum_squares_kernel.cache_clear()
    cpu_kernels.sum_squares([wide])
    assert len([*tmp_path.rglob("*.nbc")]) == 3
    cpu_kernels._sum_squares_kernel.cache_clear()
