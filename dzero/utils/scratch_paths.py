"""Scratch directories of the disk tier: opening, checks, and errors."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dzero.errors import RunError

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class DiskError(OSError, RunError):
    """Error of a scratch path: `errno`, `strerror` (action, cause and remedy) and `filename` (the path).

    Attributes:
        piece: Name of the data in transfer; empty if there was no transfer.
        offset: Offset of the transfer in the path's file, in bytes.
        count: Size of the transfer, in bytes.
    """

    def __init__(self, code: int, path: str, what: str, *, piece: str = "", offset: int = 0, count: int = 0) -> None:
        super().__init__(code, what, path)
        self.piece, self.offset, self.count = piece, offset, count

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


@contextmanager
def reported_as_disk_error(path: str, doing: str) -> Iterator[None]:
    """Convert every OSError inside to a DiskError with the path and the action."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(error.errno or 0, path, f"{doing}: {error.strerror}") from error


def mount_point(path: str) -> str:
    """Return where the file system of a path is mounted, of a missing path that of the nearest folder above it."""
    place = os.path.realpath(path)
    while not os.path.ismount(place):
        place = os.path.dirname(place)
    return place


def make_folder(path: str) -> None:
    """Create the last folder of a scratch path if it is missing; raise DiskError if no file can be created in it."""
    path = os.path.abspath(path)
    if not os.path.lexists(path):
        repair = "make it, or name another in offload.disk.paths"
        with (
            reported_as_disk_error(
                path, f"making this scratch directory ({os.path.dirname(path)} must exist and be writable: {repair})"
            ),
            suppress(FileExistsError),
        ):  # another rank may create it first
            os.mkdir(path)
    try_folder(path)


def try_folder(path: str) -> None:
    """Raise DiskError if a scratch path is no directory, or no file can be created in it."""
    os.close(open_path(path))
    with reported_as_disk_error(path, "making a file in this scratch directory"), tempfile.TemporaryFile(dir=path):
        pass


def open_path(path: str) -> int:
    """Open the directory and return its descriptor; raise DiskError if it does not exist or is a symbolic link."""
    path = os.path.abspath(path)  # drop a trailing slash, with which a link is followed in spite of O_NOFOLLOW
    if os.path.islink(path):
        target = os.path.realpath(path)
        raise DiskError(errno.ELOOP, path, f"a symbolic link is not followed: name the directory itself, {target}")
    with reported_as_disk_error(path, "a scratch path must be a directory that exists: make it, or name another"):
        return os.open(path, FOLDER)
