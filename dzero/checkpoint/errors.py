"""What is wrong with a checkpoint, for the user to read."""

from __future__ import annotations

from dzero.errors import RunError


class CheckpointError(RunError):
    """A file or folder of a checkpoint is missing, damaged, or not what it says. `path`: which."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}")
        self.path = path
