"""Speculative updates: they run before the step is decided, and can be rolled back (offload.overlap=backward).

The step is decided when all ranks have the gradient norm, and so the clipping factor, or know that the step is skipped
(`optim/grad_decision.py`). Until then a speculative update keeps what it overwrites:

    states in     kept by a speculative update
    host memory   old values, which the update writes to the unit's undo slot in the same pass
    disk          nothing: the new states are written to spare slots

Pieces of an update that run after it was committed save nothing. An update that is rolled back before it begins does
nothing. Between two pieces, updates of units that forward needs sooner go first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.disk_staging import DiskStaging
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.schedule import ActionKey, ActionKind


@dataclass
class SpeculativeUpdate:
    """Update of a unit that was started before the step is decided.

    Attributes:
        update: Updates the unit piece by piece. It calls its argument before each piece, which tells whether the piece
            must save in the undo slot what it overwrites.
        restore: Copies what was overwritten back from the undo slot.
        kept: Whether the update counts. None: the step is not decided.
        begun: Whether the update has begun.
    """

    update: Callable[[Callable[[], bool]], None]
    restore: Callable[[], None]
    kept: bool | None = None
    begun: bool = False

    def run(self, give_way: Callable[[], None]) -> None:
        """Run the update, unless it has been rolled back; call `give_way` between two pieces."""
        if self.kept is False:
            return
        self.begun = True

        def before_piece() -> bool:
            give_way()
            return not self.kept  # all pieces of an update that is rolled back are saved, so that all can be restored

        self.update(before_piece)

    def undo(self) -> None:
        """Restore what the update has overwritten, if it has begun."""
        if self.begun:
            self.restore()


class Undo:
    """Speculative updates by unit: each is started, then committed or rolled back."""

    def __init__(self, buffer_layout: BufferLayout, executor: ScheduleExecutor, staging: DiskStaging) -> None:
        self._buffer_layout, self._executor, self._staging = buffer_layout, executor, staging
        self._undecided: dict[str, SpeculativeUpdate] = {}

    def has_room(self, unit: str) -> bool:
        """Return whether a unit may be updated before the step is decided."""
        return unit in self._buffer_layout.early

    def start(self, unit: str, update: SpeculativeUpdate) -> None:
        """Start an update of a unit that can be rolled back."""
        self._undecided[unit] = update
        self._staging.load("grad", unit)
        self._staging.load("states", unit)
        key = ActionKey(ActionKind.COMPUTE, "ahead", unit)
        self._executor.compute(key, partial(update.run, partial(self._executor.give_way, key)))
        self._staging.spill("states", unit, early=True)

    def commit(self, unit: str) -> None:
        """Make a unit's speculative update final."""
        self._undecided.pop(unit).kept = True
        self._staging.keep(unit)

    def rollback(self, unit: str) -> None:
        """Start rolling back a unit's speculative update."""
        if (update := self._undecided.pop(unit, None)) is None:  # `take_all_back` has done it
            return
        update.kept = False
        self._staging.drop(unit)
        if self._buffer_layout.overwritten(unit):
            self._executor.compute(ActionKey(ActionKind.COMPUTE, "undo", unit), update.undo)

    def take_all_back(self) -> None:
        """Start rolling back all updates that have not been committed."""
        for unit in [*self._undecided]:
            self.rollback(unit)
