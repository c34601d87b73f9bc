"""The scratch file of one path: whole blocks in and out by direct I/O, and what they cost.

Direct I/O wants memory, offsets and sizes in whole pages. Memory comes from the arena, offsets from the striping; the
ragged end of a piece goes through a page of its own in the same call, so that nothing beyond the buffer is read or
written, and no caller needs to leave room there.

A short transfer goes on where it stopped; one that moves less than a page is a fault. Python itself repeats calls that
a signal interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from threading import Lock

import numpy as np
import numpy.typing as npt

from dzero.offload.pinned import ALIGNMENT_BYTES
from dzero.offload.run_folder import RunFolder
from dzero.scratch import DiskError, telling

Bytes = npt.NDArray[np.uint8]
"""uint8 [bytes], contiguous, from a 4096-aligned address on."""
EMPTY: Bytes = np.empty(0, np.uint8)


class Direction(StrEnum):
    """Which way a block goes."""

    WRITE = "write"
    READ = "read"


@dataclass(frozen=True)
class DiskUse:
    """Bytes that one path moved one way, pages filled up; seconds in which at least one transfer was under way."""

    moved_bytes: int = 0
    busy_s: float = 0.0


class DiskFile:
    """`needed_bytes` of scratch space on `path`, in a run directory of its own. Raises DiskError as RunFolder does.

    direct: ask for direct I/O; `is_direct` says whether the file system has it (true for a file of no bytes).
    """

    def __init__(self, path: str, needed_bytes: int, *, rank: int, direct: bool) -> None:
        self._meters = {direction: _Meter() for direction in Direction}
        with ExitStack() as undo:
            # Gives everything back when nobody refers to this file any more, so not before the last transfer's end.
            self._folder = undo.enter_context(RunFolder(path, needed_bytes, rank=rank))
            self.path, self.fd, self.close = self._folder.path, self._folder.fd, self._folder.close
            self._direct, self.is_direct = direct, direct
            if needed_bytes:
                self._write_first_page()
            undo.pop_all()

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def grow(self, needed_bytes: int) -> None:
        """Have `needed_bytes` at least; what was written stays. Raises DiskError as RunFolder does."""
        had = self._folder.needed_bytes
        if needed_bytes > had:
            self._folder.grow(needed_bytes)
            if not had:
                self._write_first_page()

    def _write_first_page(self) -> None:
        with telling(self.path, "writing a first page"):
            self.is_direct = self._direct and _make_direct(self.fd)

    def write(self, offset: int, data: Bytes, piece: str) -> None:
        """Write all of `data` at `offset`. Raises DiskError with errno, path, piece, offset and bytes."""
        whole, rest = _whole_pages(data)
        self._transfer(Direction.WRITE, offset, [whole, _page(rest)] if rest.size else [whole], piece)

    def read(self, offset: int, data: Bytes, piece: str) -> None:
        """Fill all of `data` from `offset`. Raises DiskError with errno, path, piece, offset and bytes."""
        whole, rest = _whole_pages(data)
        parts = [whole, _page(EMPTY)] if rest.size else [whole]
        self._transfer(Direction.READ, offset, parts, piece)
        rest[:] = parts[-1][: rest.size]

    def use(self, direction: Direction) -> DiskUse:
        """Since the file was made."""
        return self._meters[direction].use()

    def _transfer(self, direction: Direction, offset: int, parts: list[Bytes], piece: str) -> None:
        """Move whole pages between `parts`, one after the other, and the file from `offset` on."""
        call = os.pwritev if direction is Direction.WRITE else os.preadv
        count, done = sum(part.size for part in parts), 0
        with self._meters[direction].moving(count):
            while done < count:
                try:
                    moved = call(self.fd, _after(parts, done), offset + done)
                    moved -= moved % ALIGNMENT_BYTES
                    if not moved:
                        raise OSError(errno.EIO, "no page was moved: the file was cut short, or takes no more")
                except OSError as error:
                    at, left = offset + done, count - done
                    what = f"{direction} of piece {piece!r}, {left} bytes at offset {at} of the scratch file"
                    what = f"{what}: {error.strerror}"
                    raise DiskError(error.errno or 0, self.path, what, piece=piece, offset=at, count=left) from error
                done += moved


def _after(parts: list[Bytes], done: int) -> list[memoryview]:
    """What is left of `parts` when `done` bytes have moved."""
    left = []
    for part in parts:
        if part.size > done:
            left.append(part[done:].data)
        done = max(0, done - part.size)
    return left


def _whole_pages(data: Bytes) -> tuple[Bytes, Bytes]:
    """`data` up to its last whole page, and the rest."""
    at = data.size - data.size % ALIGNMENT_BYTES
    return data[:at], data[at:]


def _page(start: Bytes) -> Bytes:
    """An aligned page that begins with `start`; zeros behind it."""
    page: Bytes = np.frombuffer(mmap.mmap(-1, ALIGNMENT_BYTES), np.uint8)
    page[: start.size] = start
    return page


def _make_direct(fd: int) -> bool:
    """Switch direct I/O on. False, and off again, where the file system refuses at once or at the first page."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwritev(fd, [_page(EMPTY).data], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return False
    return True


class _Meter:
    """Bytes, and the seconds in which somebody was at work: overlapping transfers count once."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._use = DiskUse()
        self._at_work, self._since = 0, 0.0

    @contextmanager
    def moving(self, count: int) -> Iterator[None]:
        with self._lock:
            if not self._at_work:
                self._since = time.perf_counter()
            self._at_work += 1
        try:
            yield
        finally:
            with self._lock:
                self._at_work -= 1
                busy_s = 0.0 if self._at_work else time.perf_counter() - self._since
                self._use = DiskUse(self._use.moved_bytes + count, self._use.busy_s + busy_s)

    def use(self) -> DiskUse:
        with self._lock:
            return self._use
