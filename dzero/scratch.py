"""Scratch paths: how they are opened, and the one error of the disk tier."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class DiskError(OSError):
    """A fault of a scratch path: `errno`, `strerror` (what was done, what is wrong, the repair), `filename` (the path).

    piece, offset, count: whose bytes, where in the path's file, how many; empty and 0 where no transfer was running.
    """

    def __init__(self, code: int, path: str, what: str, *, piece: str = "", offset: int = 0, count: int = 0) -> None:
        super().__init__(code, what, path)
        self.piece, self.offset, self.count = piece, offset, count


@contextmanager
def telling(path: str, doing: str) -> Iterator[None]:
    """Every OSError inside says what was being done, and where."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(error.errno or 0, path, f"{doing}: {error.strerror}") from error


def open_path(path: str) -> int:
    """A descriptor of the directory. Raises DiskError where there is none; a symbolic link is not followed."""
    path = os.path.abspath(path)  # drops a trailing slash, which would follow a link in spite of O_NOFOLLOW
    if os.path.islink(path):
        target = os.path.realpath(path)
        raise DiskError(errno.ELOOP, path, f"a symbolic link is not followed: name the directory itself, {target}")
    with telling(path, "a scratch path must be a directory that exists: make it, or name another"):
        return os.open(path, FOLDER)
