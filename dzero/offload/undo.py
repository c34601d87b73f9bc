"""Speculative updates: they run before the step is decided, and can be rolled back (offload.overlap=backward).

The step is decided when all ranks have the gradient norm, and so the clipping factor, or know that the step is skipped
(`optim/grad_decision.py`). Until then a speculative update keeps what it overwrites:

    states in     saved before a speculative update
    host memory   what it overwrites is copied to the unit's undo slot, in the same action
    disk          nothing: the new states are written to spare slots
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.disk_staging import DiskStaging
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import aligned
from dzero.offload.schedule import ActionKey, ActionKind


class Undo:
    """Speculative updates by unit: each is started, then committed or rolled back."""

    def __init__(self, buffer_layout: BufferLayout, executor: ScheduleExecutor, staging: DiskStaging) -> None:
        self._buffer_layout, self._executor, self._staging = buffer_layout, executor, staging
        self._undecided: set[str] = set()

    def has_room(self, unit: str) -> bool:
        """Return whether a unit may be updated before the step is decided."""
        return unit in self._buffer_layout.early

    def start(self, unit: str, work: Callable[[], None]) -> None:
        """Start `work`, an update of a unit that can be rolled back."""
        self._undecided.add(unit)
        self._staging.load("grad", unit)
        self._staging.load("states", unit)
        self._executor.compute(ActionKey(ActionKind.COMPUTE, "ahead", unit), partial(self._save, unit, work))
        self._staging.spill("states", unit, early=True)

    def commit(self, unit: str) -> None:
        """Make a unit's speculative update final."""
        self._undecided.discard(unit)
        self._staging.keep(unit)

    def rollback(self, unit: str) -> None:
        """Start rolling back a unit's speculative update."""
        self._undecided.discard(unit)
        self._staging.drop(unit)
        if self._buffer_layout.overwritten(unit):
            self._executor.compute(ActionKey(ActionKind.COMPUTE, "undo", unit), partial(self._restore, unit))

    def take_all_back(self) -> None:
        """Start rolling back all updates that have not been committed."""
        for unit in [*self._undecided]:
            self.rollback(unit)

    def _save(self, unit: str, then: Callable[[], None]) -> None:
        for saved, data in self._saved(unit):
            saved.copy_(data)
        then()

    def _restore(self, unit: str) -> None:
        for saved, data in self._saved(unit):
            data.copy_(saved)

    def _saved(self, unit: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        start = 0
        for slot in self._buffer_layout.overwritten(unit):
            data = self._executor.leases[slot].data
            yield self._executor.leases[f"undo {unit}"].data[start : start + data.numel()], data
            start += aligned(data.numel())
