"""Scratch paths: how they are opened, and the one error of the disk tier."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dzero.errors import RunError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class DiskError(OSError, RunError):
    """A fault of a scratch path: `errno`, `strerror` (what was done, what is wrong, the repair), `filename` (the path).

    piece, offset, count: whose bytes, where in the path's file, how many; empty and 0 where no transfer was running.
    """

    def __init__(self, code: int, path: str, what: str, *, piece: str = "", offset: int = 0, count: int = 0) -> None:
        super().__init__(code, what, path)
        self.piece, self.offset, self.count = piece, offset, count

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def reported_as_disk_error(path: str, doing: str) -> Iterator[None]:
    """Every OSError inside says what was being done, and where."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(error.errno or 0, path, f"{doing}: {error.strerror}") from error


def make_folder(path: str) -> None:
    """Make the last folder of a scratch path where it is missing.

    Raises DiskError where its parent is missing too, and for a path in which no file can be made.
    """
    path = os.path.abspath(path)
    if not os.path.lexists(path):
        repair = "make it, or name another in offload.disk.paths"
        with (
            reported_as_disk_error(
                path, f"making this scratch directory ({os.path.dirname(path)} must exist and be writable: {repair})"
            ),
            suppress(FileExistsError),
        ):  # another rank's work
            os.mkdir(path)
    try_folder(path)


def try_folder(path: str) -> None:
    """Raises DiskError for a scratch path that is no directory, or in which no file can be made."""
    os.close(open_path(path))
    with reported_as_disk_error(path, "making a file in this scratch directory"), tempfile.TemporaryFile(dir=path):
        pass


def open_path(path: str) -> int:
    """A descriptor of the directory. Raises DiskError where there is none; a symbolic link is not followed."""
    path = os.path.abspath(path)  # drops a trailing slash, which would follow a link in spite of O_NOFOLLOW
    if os.path.islink(path):
        target = os.path.realpath(path)
        raise DiskError(errno.ELOOP, path, f"a symbolic link is not followed: name the directory itself, {target}")
    with reported_as_disk_error(path, "a scratch path must be a directory that exists: make it, or name another"):
        return os.open(path, FOLDER)
