"""Errors of checkpoints, with messages for the user."""

from __future__ import annotations

from dzero.errors import RankLost, RunError


class CheckpointError(RunError):
    """A file or folder `path` of a checkpoint is missing, damaged or invalid; `path` is empty if `what` names it."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.path = path


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint that are missing or differ from those written; an older checkpoint may be intact."""


class RankUnavailable(CheckpointError, RankLost):
    """A rank that did not respond when all ranks had to agree on a checkpoint."""
