"""Direct I/O: whole pages between memory and a file, past the page cache where the file system can.

It wants memory, offsets and sizes in whole pages. The ragged end of a buffer goes through a page of its own in the same
call, so that nothing beyond the buffer is read or written. A short transfer goes on where it stopped; one that moves
less than a page is a fault. Python itself repeats calls that a signal interrupted.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from dzero.offload.memory_pool import ALIGNMENT_BYTES

Bytes = npt.NDArray[np.uint8]
"""uint8 [bytes], contiguous, from a 4096-aligned address on."""
EMPTY: Bytes = np.empty(0, np.uint8)


class Direction(StrEnum):
    """Which way a block goes."""

    WRITE = "write"
    READ = "read"


class TransferError(OSError):
    """`done` of `count` bytes had moved."""

    def __init__(self, error: OSError, done: int, count: int) -> None:
        super().__init__(error.errno or 0, error.strerror)
        self.done, self.count = done, count


def whole_pages(count: int) -> int:
    """Bytes of the pages that hold `count` bytes."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def transfer(direction: Direction, fd: int, offset: int, data: Bytes) -> None:
    """Write all of `data` at `offset`, and zeros to the end of the last page; or fill it from there.

    When it is filled the file may end with `data`. Raises TransferError.
    """
    at = data.size - data.size % ALIGNMENT_BYTES
    whole, rest = data[:at], data[at:]
    parts = [whole, _page(rest)] if rest.size else [whole]
    _move(direction, fd, offset, parts, data.size)
    if direction is Direction.READ:
        rest[:] = parts[-1][: rest.size]


def _move(direction: Direction, fd: int, offset: int, parts: list[Bytes], needed: int) -> None:
    """Whole pages between `parts`, one after the other, and the file from `offset` on; enough for `needed` bytes."""
    call = os.pwritev if direction is Direction.WRITE else os.preadv
    count, done = whole_pages(needed), 0
    while done < needed:
        try:
            moved = call(fd, _after(parts, done), offset + done)
            if done + moved < needed:
                moved -= moved % ALIGNMENT_BYTES
            if not moved:
                raise OSError(errno.EIO, "no page was moved: the file was cut short, or takes no more")
        except OSError as error:
            raise TransferError(error, done, count) from error
        done += moved


def _after(parts: list[Bytes], done: int) -> list[memoryview]:
    """What is left of `parts` when `done` bytes have moved."""
    left = []
    for part in parts:
        if part.size > done:
            left.append(part[done:].data)
        done = max(0, done - part.size)
    return left


def _page(start: Bytes) -> Bytes:
    """An aligned page that begins with `start`; zeros behind it."""
    page: Bytes = np.frombuffer(mmap.mmap(-1, ALIGNMENT_BYTES), np.uint8)
    page[: start.size] = start
    return page


def make_direct(fd: int, direction: Direction = Direction.WRITE) -> bool:
    """Switch direct I/O on; False, and off again, where the file system refuses. To write, it zeros the first page."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        (os.pwritev if direction is Direction.WRITE else os.preadv)(fd, [_page(EMPTY).data], 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        return False
    return True
