"""What a run takes of each tier, counted from what there is: nothing here asks a table, a schedule or a prediction.

    device   storages of tensors that are alive, made at any time since the meter was entered (storages.py)
    host     leases that were handed out of the arena, whole pages; waiting activations' too
    disk     scratch files that this process has open; they have no name, no folder shows them (offload/run_folder.py)

So a state that is kept twice counts twice: outside the arena, on the device of a CPU.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dzero.offload.run_folder import NAME
from dzero.optim.adamw import AdamW
from dzero.plan.storages import StorageMeter

LEARNING = 3
"""Steps until parameters that come from elsewhere are brought in an order that stays (offload/incoming.py)."""
OPEN_FILES = Path("/proc/self/fd")


@dataclass(frozen=True)
class Taken:
    """Bytes of one rank. `device`: at the fullest moment of a step; the others between steps."""

    device: int
    host: int
    disk: int


def taken(meter: StorageMeter, step: Callable[[], object], optim: AdamW) -> Taken:
    """In one more step, nothing of which is left for later. `meter`: entered before the model was made."""
    for _ in range(LEARNING):
        _alone(step, optim)
    gc.collect()
    meter.begin()
    _alone(step, optim)
    peak = max(moment.total for moment in meter.moments())
    return Taken(peak, host_bytes(optim), disk_bytes())


def host_bytes(optim: AdamW) -> int:
    """Of the leases that the optimizer's arena, and its activations', handed out."""
    return optim.offload.host_bytes


def disk_bytes() -> int:
    """Of the scratch files of runs, by what the file system says of each that is open here."""
    sizes = {}
    for link in OPEN_FILES.iterdir():
        with suppress(FileNotFoundError):  # the folder's own, closed since
            target = Path(os.readlink(link))
            if NAME.fullmatch(target.parent.name) and target.name.startswith("data"):
                found = link.stat()
                sizes[found.st_dev, found.st_ino] = found.st_size
    return sum(sizes.values())


def _alone(step: Callable[[], object], optim: AdamW) -> None:
    step()
    optim.await_updates()
