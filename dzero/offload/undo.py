"""Updates that can be taken back (offload.overlap=backward): what they overwrite is kept until the step is decided.

states live in     before an early update
host memory        what it overwrites is copied to the unit's undo slot, by the same action
on disk            nothing: the new states go to spare places there
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
    """Early updates, unit by unit: each is started, then kept or taken back."""

    def __init__(self, buffer_layout: BufferLayout, executor: ScheduleExecutor, staging: DiskStaging) -> None:
        self._buffer_layout, self._executor, self._staging = buffer_layout, executor, staging
        self._undecided: set[str] = set()

    def has_room(self, unit: str) -> bool:
        """Whether this unit may be updated before the step is decided."""
        return unit in self._buffer_layout.early

    def start(self, unit: str, work: Callable[[], None]) -> None:
        """Start an update that can be taken back."""
        self._undecided.add(unit)
        self._staging.load("grad", unit)
        self._staging.load("states", unit)
        self._executor.compute(ActionKey(ActionKind.COMPUTE, "ahead", unit), partial(self._save, unit, work))
        self._staging.spill("states", unit, early=True)

    def commit(self, unit: str) -> None:
        """It is the update that is due."""
        self._undecided.discard(unit)
        self._staging.keep(unit)

    def rollback(self, unit: str) -> None:
        """Start to make it undone."""
        self._undecided.discard(unit)
        self._staging.drop(unit)
        if self._buffer_layout.overwritten(unit):
            self._executor.compute(ActionKey(ActionKind.COMPUTE, "undo", unit), partial(self._restore, unit))

    def take_all_back(self) -> None:
        """Start to make undone what was not decided yet."""
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
