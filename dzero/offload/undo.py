"""Speculative updates: they run before the step is decided, and can be undone (offload.overlap=backward).

The step is decided when all ranks have the gradient norm, and so the clipping factor, or know that the step is skipped
(`optim/grad_decision.py`). Until then a speculative update leaves the old states as they are:

    states in     where a speculative update writes the new ones
    host memory   the unit's undo slot; if they are there already, the slots that they came from
    disk          spare slots on disk

When the update is committed, the two places are exchanged; nothing is copied. An update that is rolled back stops, and
what it wrote is ignored. Code outside a step knows only the first place, so `bring_home` copies the states there.
Between its pieces, an update lets those of units that forward needs sooner go first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.disk_staging import DiskStaging
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.schedule import ActionKey, ActionKind


@dataclass
class SpeculativeUpdate:
    """Update of a unit that was started before the step is decided.

    Attributes:
        update: Updates the unit in pieces, out of place. It calls its argument before each few, which tells whether to
            go on.
        is_undone: Whether the update has been rolled back.
    """

    update: Callable[[Callable[[], bool]], None]
    is_undone: bool = False

    def run(self, give_way: Callable[[], None]) -> None:
        """Run the update as long as it is not rolled back; call `give_way` between its pieces."""

        def before_piece() -> bool:
            give_way()
            return not self.is_undone

        if not self.is_undone:
            self.update(before_piece)


class Undo:
    """Speculative updates by unit: each is started, then committed or rolled back. Must be used by one thread."""

    def __init__(self, buffer_layout: BufferLayout, executor: ScheduleExecutor, staging: DiskStaging) -> None:
        self._buffer_layout, self._executor, self._staging = buffer_layout, executor, staging
        self._undecided: dict[str, SpeculativeUpdate] = {}
        self._exchanged: set[str] = set()

    def has_room(self, unit: str) -> bool:
        """Return whether a unit may be updated before the step is decided."""
        return unit in self._buffer_layout.early

    def is_exchanged(self, unit: str) -> bool:
        """Return whether a unit's states are in its undo slot, once all started actions have ended."""
        return unit in self._exchanged

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
        del self._undecided[unit]
        self._staging.keep(unit)
        if self._buffer_layout.undo_places[unit]:
            self._exchanged ^= {unit}

    def rollback(self, unit: str) -> None:
        """Roll back a unit's speculative update."""
        if (update := self._undecided.pop(unit, None)) is not None:  # else `take_all_back` has done it
            update.is_undone = True
            self._staging.drop(unit)

    def take_all_back(self) -> None:
        """Roll back all updates that have not been committed."""
        for unit in [*self._undecided]:
            self.rollback(unit)

    def bring_home(self) -> None:
        """Copy states that are in undo slots to the slots that they came from, when all started actions have ended."""
        assert not self._undecided, "early updates are committed or rolled back before states come to rest"
        for unit in self._exchanged:
            for slot, place in self._buffer_layout.undo_places[unit].items():
                self._executor.leases[slot].view(torch.uint8, place.elems).copy_(self._executor.view(place))
        self._exchanged = set()
