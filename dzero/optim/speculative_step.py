"""Updates before the decision (offload.overlap=backward), taken back to the bit where the decision turns out otherwise.

A unit whose gradients are complete is updated while backward goes on to the units before it, as if nothing will be
clipped and everything is finite. What it overwrites is saved first, in undo slots of a bounded size (states on disk go
to spare places there instead); units beyond them wait for the decision. The working copy stays where it was until the
step is decided, so backward never meets new weights. At the decision each unit's early update is either the one that is
due, then only its working copy is sent; or it is undone, and made again with the right coefficients.

While clipping is frequent nothing is started early: it would be done twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dzero.offload.undo import Undo

WINDOW_STEPS, CLIPPED_STEPS = 8, 2


class SpeculativeStep:
    """Which units were updated early in this step, and with what coefficients (`how`, by parameter)."""

    def __init__(self, undo: Undo) -> None:
        self._undo = undo
        self._started: dict[str, Mapping[str, Any]] = {}
        self._clipped: deque[bool] = deque(maxlen=WINDOW_STEPS)

    def allows(self, unit: str) -> bool:
        """Whether `unit` has an undo slot, and most recent steps were not clipped."""
        return self._undo.has_room(unit) and sum(self._clipped) < CLIPPED_STEPS

    def start(self, unit: str, how: Mapping[str, Any], run: Callable[[], None]) -> None:
        """Save the unit's states, then `run` its update."""
        self._undo.start(unit, run)
        self._started[unit] = how

    def resolve(self, how: Mapping[str, Any], *, clipped: bool) -> set[str]:
        """Parameters whose early update is the one that is due (`how`); all others are undone."""
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
        """Undo all: the step is not to count."""
        for unit in self._started:
            self._undo.rollback(unit)
        self._started = {}
