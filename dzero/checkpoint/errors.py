"""What is wrong with a checkpoint, for the user to read."""

from __future__ import annotations

from dzero.errors import RankLost, RunError


class CheckpointError(RunError):
    """A file or folder of a checkpoint is missing, damaged, or not what it says. `path`: which; empty where `what` says
    it."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.path = path


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint that are missing, or are not what was written. An older checkpoint may still be whole."""


class RankUnavailable(CheckpointError, RankLost):
    """A rank did not answer where all agree on a checkpoint."""
