"""What a run takes of each tier, counted from what there is: nothing here asks a table, a schedule or a prediction.

    device   storages of tensors that are alive, made at any time since the meter was entered (storage_meter.py)
    host     leases that were handed out of the arena, whole pages; waiting activations' too
    disk     scratch files that this process has open, and had not when the meter was entered; they have no name, no
             folder shows them (offload/scratch_dir.py)

So a state that is kept twice counts twice: outside the arena, on the device of a CPU.
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
"""Steps until parameters that come from elsewhere are brought in an order that stays (offload/param_prefetch.py)."""
STEPS = 3
"""Steps whose peaks are taken: what a copy or a collective is still holding makes one differ from another."""
OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes of one rank. `device`: at the fullest moment of a step, the least of some steps; `device_most`: of all.

    Copies and collectives under way keep what they move, longer on a busy machine. `host`, `disk`: between steps.
    """

    device: int
    device_most: int
    host: int
    disk: int


class MemoryCount:
    """Counts between enter and exit; entered before the model is made."""

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
        """In a few more steps, nothing of which is left for later."""
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
    """Of the leases that the optimizer's arena, and its activations', handed out."""
    return optim.offload.host_bytes


def _scratch_files() -> dict[tuple[int, int], int]:
    """Bytes, by device and inode, of each scratch file of a run that is open here, as the file system says."""
    sizes = {}
    for link in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # the folder's own, closed since
            target = Path(os.readlink(link))
            if NAME.fullmatch(target.parent.name) and target.name.startswith("data"):
                found = link.stat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sizes


def _alone(step: Callable[[], object], optim: AdamW) -> None:
    step()
    optim.await_updates()
