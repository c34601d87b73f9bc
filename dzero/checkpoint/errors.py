"""Errors of checkpoints, with messages for the user."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dzero.errors import RankLost, RunError

REPAIRS = {
    errno.ENOSPC: "free space, or point checkpoint.folder to another disk",
    errno.EDQUOT: "free space within your quota, or point checkpoint.folder to another disk",
    errno.EACCES: "this user may not; change the permissions, or checkpoint.folder",
    errno.EROFS: "choose a checkpoint.folder that can be written",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EEXIST: "another file is in the way; remove it",
    errno.ELOOP: "symbolic links are not followed in checkpoints; name the folder itself",
    errno.ENOTDIR: "name a folder",
    errno.ENOENT: "it is missing; take another checkpoint",
}
DAMAGE = (errno.ENOENT, errno.EIO, errno.ESTALE, errno.EISDIR, errno.ENOTDIR)
"""System errors that mean missing bytes; others mean that the bytes could not be accessed."""


class CheckpointError(RunError):
    """A file or folder `path` of a checkpoint is missing, damaged or invalid; `path` is empty if `what` names it."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(f"{path}: {what}" if path else what)
        self.path = path


class CheckpointDamaged(CheckpointError):
    """Bytes of a checkpoint that are missing or differ from those written; an older checkpoint may be intact."""


class RankUnavailable(CheckpointError, RankLost):
    """A rank that did not respond when all ranks had to agree on a checkpoint."""


@contextmanager
def reported_as_checkpoint_error(path: Path | str) -> Iterator[None]:
    """Raise system errors as `CheckpointError`, with the file and a remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except OSError as error:
        repair, kind = REPAIRS.get(error.errno or 0), CheckpointDamaged if error.errno in DAMAGE else CheckpointError
        raise kind(str(path), f"{error.strerror or error}{f': {repair}' if repair else ''}") from error
