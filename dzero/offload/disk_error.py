"""The one error of the disk tier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
