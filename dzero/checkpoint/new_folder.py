"""Folders of an export or import, which are all there or not at all.

    order     on disk when it has ended
    1 files   OUT.partial/, every file with fsync, and the entries of the folder
    2 name    OUT, by a rename, and the entries of the folder above

Nothing that exists is written over: neither OUT, nor an OUT.partial that another export left or is writing.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.store import PARTIAL, Directory
from dzero.hardware import format_bytes


@contextmanager
def new_folder(out: Path, needed_bytes: int, what: str = "export") -> Iterator[Directory]:
    """Yield a new folder to write durable files into; it gets the name `out` when the block has ended.

    Nothing is left behind if the block raises.

    Args:
        out: The folder, in one that exists.
        needed_bytes: Bytes that will be written.
        what: What writes it, for messages.

    Raises:
        CheckpointError: If something of that name exists, the disk is too small, or the folder cannot be created or
            renamed.
    """
    out = out.absolute()
    unfinished = out.with_name(out.name + PARTIAL)
    for path, whose in ((out, ""), (unfinished, f", left by an {what} that was stopped or is under way")):
        if os.path.lexists(path):
            raise CheckpointError(str(path), f"it is there already{whose}: remove it, or choose another folder")
    with reported_as_export_error(out.parent, what):
        free = shutil.disk_usage(out.parent).free
    if free < needed_bytes:
        needed = f"{format_bytes(needed_bytes)} to write, {format_bytes(free)} free"
        raise CheckpointError(str(out), f"{needed}: free space, or choose another disk")
    with reported_as_export_error(unfinished, what):
        unfinished.mkdir()
    try:
        with Directory(unfinished) as folder:
            yield folder
            folder.sync()
        with reported_as_export_error(out, what):
            unfinished.rename(out)  # fails if another export has written a folder of this name since
        with Directory(out.parent) as above:
            above.sync()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextmanager
def reported_as_export_error(path: Path, what: str = "export") -> Iterator[None]:
    """Raise system errors as `CheckpointError`, with what an export or import needs."""
    try:
        yield
    except OSError as error:
        repair = "free space, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose"
        raise CheckpointError(str(path), f"{error.strerror}: {repair} another folder; nothing was {what}ed") from error
