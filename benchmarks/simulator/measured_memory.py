"""Memory that a run takes of each tier, counted independently of the table, the schedule and any prediction.

    device   live storages of tensors, made since the meter was entered (`storage_meter.py`)
    host     leases of the host memory pool, in whole pages, including those of offloaded activations
    disk     scratch files that this process has opened since then, which no folder lists (`offload/scratch_dir.py`)

On a CPU, a state that is kept both in the host memory pool and outside of it counts twice, on host and device.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from dzero.offload.scratch_dir import NAME
from dzero.optim.adamw import AdamW
from simulator.storage_meter import StorageMeter

LEARNING = 3
"""Steps until the order in which offloaded parameters are prefetched is stable (`offload/param_prefetch.py`)."""
STEPS = 3
"""Steps whose peaks are measured, since copies and collectives in flight make peaks differ between steps."""
OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one rank.

    Copies and collectives in flight hold what they move, longer on a busy machine.

    Attributes:
        device: Minimum over some steps of the peak of a step.
        device_most: Maximum over these steps.
        host, disk: Bytes between steps.
    """

    device: int
    device_most: int
    host: int
    disk: int


class MemoryCount:
    """Context that counts memory; enter it before the model is made."""

    def __init__(self) -> None:
        self._meter, self._open = StorageMeter(), ExitStack()

    def __enter__(self) -> MemoryCount:
        gc.collect()
        self._others = _scratch_files()
        self._open.enter_context(self._meter)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def taken(self, step: Callable[[], object], optim: AdamW) -> MeasuredMemory:
        """Return the memory of a few more steps, each completed with all its updates."""
        _alone(step, optim)
        away = host_bytes(optim) > 0
        for _ in range(LEARNING - 1 if away else 0):
            _alone(step, optim)
        peaks = [self._peak(step, optim) for _ in range(STEPS)]
        own = [count for file, count in _scratch_files().items() if file not in self._others]
        return MeasuredMemory(min(peaks), max(peaks), host_bytes(optim), sum(own))

    def _peak(self, step: Callable[[], object], optim: AdamW) -> int:
        gc.collect()
        self._meter.begin()
        _alone(step, optim)
        return max(moment.total for moment in self._meter.moments())


def host_bytes(optim: AdamW) -> int:
    """Return the bytes leased from the host memory pools of the optimizer and of its activations."""
    return optim.offload.host_bytes


def _scratch_files() -> dict[tuple[int, int], int]:
    """Return the size of each open scratch file of a run in this process, by device and inode."""
    sizes = {}
    for link in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # descriptor of the listing itself, closed by now
            target = Path(os.readlink(link))
            if NAME.fullmatch(target.parent.name) and target.name.startswith("data"):
                found = link.stat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sizes


def _alone(step: Callable[[], object], optim: AdamW) -> None:
    step()
    optim.await_updates()
