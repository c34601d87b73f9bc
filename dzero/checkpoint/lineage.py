"""Lineage: which checkpoints are steps of one training, across restarts and across going back.

Every start of a run has an id of its own, and remembers from where it resumed:

    start of a run      id    its lineage                   saves          what of the others is its own
    afresh              a     a                             a@10, a@20
    resume=auto         b     a up to 20, b                 b@30           a@10, a@20
    back to step 10     c     a up to 10, c                 c@20           a@10; a@20 and b@30 are another branch

So the number of a step alone never decides what is newest, or what may be removed.
"""

from __future__ import annotations

import re
import uuid
from typing import NamedTuple

RUN = re.compile(r"[0-9a-f]{32}")
Segment = tuple[str, int]
"""A run, and its last step that counts."""


class Lineage(NamedTuple):
    """A start of a run and what it goes on from, the oldest first. An empty `run`: saved before runs had ids."""

    run: str = ""
    ancestors: tuple[Segment, ...] = ()

    def position(self, run: str, step: int) -> tuple[int, int] | None:
        """Return where along the lineage the checkpoint of `run` at `step` lies, None where it is no part of it."""
        for number, (each, last) in enumerate(self.ancestors):
            if each == run and step <= last:
                return number, step
        return (len(self.ancestors), step) if self.run and run == self.run else None

    def resumed(self, step: int) -> Lineage:
        """Return the lineage of a new start of a run that goes on from `step` of this one."""
        return Lineage(uuid.uuid4().hex, (*self.ancestors, (self.run, step)) if self.run else ())

    def check(self) -> None:
        """Raises ValueError for what is no lineage."""
        runs = [run for run, _ in self.ancestors] + ([self.run] if self.run or self.ancestors else [])
        if not all(map(RUN.fullmatch, runs)) or any(step < 0 for _, step in self.ancestors):
            raise ValueError(f"run {self.run!r} after {self.ancestors} is no lineage")
