"""Lineage: the checkpoints that belong to one training, across restarts and returns to earlier steps.

Every start of a run has an id of its own, and records where it resumed from:

    start of a run      id    its lineage                   saves          older checkpoints in its lineage
    from scratch        a     a                             a@10, a@20
    resume=auto         b     a up to 20, b                 b@30           a@10, a@20
    back to step 10     c     a up to 10, c                 c@20           a@10; a@20 and b@30 are another branch

A step number alone therefore never decides which checkpoint is the newest, or which may be removed.
"""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

RUN = re.compile(r"[0-9a-f]{32}")
Segment = tuple[str, int]
"""Id of a run, and the last of its steps that belongs to the lineage."""


class Lineage(NamedTuple):
    """A run and the runs that it continues.

    Attributes:
        run: Id of the run; empty for checkpoints saved before runs had ids.
        ancestors: Runs that it continues, the oldest first.
    """

    run: str = ""
    ancestors: tuple[Segment, ...] = ()

    def position(self, run: str, step: int) -> tuple[int, int] | None:
        """Return the position in the lineage of the checkpoint of `run` at `step`; None if it is not part of it."""
        for number, (each, last) in enumerate(self.ancestors):
            if each == run and step <= last:
                return number, step
        return (len(self.ancestors), step) if self.run and run == self.run else None

    def resumed(self, step: int) -> Lineage:
        """Return the lineage of a new run that resumes from `step` of this one."""
        return Lineage(uuid.uuid4().hex, (*self.ancestors, (self.run, step)) if self.run else ())

    def check(self) -> None:
        """Raise ValueError if an id or a step is invalid."""
        runs = [run for run, _ in self.ancestors] + ([self.run] if self.run or self.ancestors else [])
        if not all(map(RUN.fullmatch, runs)) or any(step < 0 for _, step in self.ancestors):
            raise ValueError(f"run {self.run!r} after {self.ancestors} is no lineage")
