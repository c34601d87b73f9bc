"""What a step of gpu_session.py tells: figures in a file, kept as they come, for a step may be cut off."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


class Findings:
    """The figures of one step.

    path: the file. `finding`: the one line for people. `stand_ins`: what a rehearsal on a CPU did in place of what only
    a GPU has.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.figures = path, dict[str, Any]()
        self.finding, self.stand_ins = "", list[str]()

    def note(self, **figures: Any) -> None:
        """Add figures, or replace those of the same names, and write."""
        self.figures |= figures
        self.write()

    def find(self, finding: str) -> None:
        """Say the one line, and write."""
        self.finding = finding
        print(f"finding: {finding}", flush=True)
        self.write()

    def stand_in(self, what: str) -> None:
        """Say what stands for a GPU's part, and write."""
        self.stand_ins.append(what)
        self.write()

    def write(self) -> None:
        """Write the whole file, in one move."""
        told = {"finding": self.finding, "figures": self.figures, "stand_ins": self.stand_ins}
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(told))
        os.replace(fresh, self._path)


def read(path: Path) -> dict[str, Any]:
    """Return what a step has told so far; nothing where it told nothing."""
    if not path.exists():
        return {"finding": "", "figures": {}, "stand_ins": []}
    told: dict[str, Any] = json.loads(path.read_text())
    return told
