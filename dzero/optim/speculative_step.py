"""Updates before the step is decided (offload.overlap=backward), which are undone if the decision differs.

When a unit's gradients are complete, it is updated while backward goes on to the units before it, as if nothing will be
clipped and all gradients are finite. The host takes the unit that the next forward needs first among those that have
arrived. New states are written beside the old ones, to undo slots of a bounded size, or on disk to spare ones
(`offload/undo.py`). Units without a slot wait for the decision. The working copy is not replaced before the step is
decided, so backward never reads new weights. If the decision confirms the coefficients of an early update, only its
working copy is sent. Otherwise the update stops, and the unit is updated again, from the old states.

While clipping is frequent nothing is started early, because it would run twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dzero.offload.undo import SpeculativeUpdate, Undo

WINDOW_STEPS, CLIPPED_STEPS = 8, 2


class SpeculativeStep:
    """Units that were updated early in this step, with their coefficients `how` by parameter."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._started: dict[str, Mapping[str, Any]] = {}
        self._clipped: deque[bool] = deque(maxlen=WINDOW_STEPS)

    def allows(self, unit: str) -> bool:
        """Return whether `unit` has an undo slot, and few of the last WINDOW_STEPS steps were clipped."""
        return self._undo.has_room(unit) and sum(self._clipped) < CLIPPED_STEPS

    def start(self, unit: str, how: Mapping[str, Any], update: Callable[[Callable[[], bool]], None]) -> None:
        """Start the update of a unit with the coefficients `how`; `update` is that of `SpeculativeUpdate`."""
        self._undo.start(unit, SpeculativeUpdate(update))
        self._started[unit] = how

    def resolve(self, how: Mapping[str, Any], *, clipped: bool) -> set[str]:
        """Keep early updates that match the final coefficients `how`, and undo others; return the kept parameters."""
        self._clipped.append(clipped)
        due: set[str] = set()
        for unit, early in self._started.items():
            if all(how.get(name) == value for name, value in early.items()):
                due |= early.keys()
                self._undo.commit(unit)
            else:
                self._undo.rollback(unit)
        self._started = {}
        return due

    def abandon(self) -> None:
        """Undo all early updates, because the step does not count."""
        self._undo.take_all_back()
        self._started = {}
