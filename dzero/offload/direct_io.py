"""Direct I/O: transfers of whole pages between memory and a file that bypass the page cache where possible.

Direct I/O requires addresses, offsets and sizes in whole pages. A partial page at the end of a buffer is transferred
through a separate page in the same call, so that nothing beyond the buffer is read or written. A short transfer
continues where it stopped; one that moves less than a page is an error. Python itself repeats calls that were
interrupted by a signal.
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
"""Array uint8 [bytes], contiguous, at a 4096-aligned address."""
EMPTY: Bytes = np.empty(0, np.uint8)


class Direction(StrEnum):
    """Direction of a transfer."""

    WRITE = "write"
    READ = "read"


class TransferError(OSError):
    """Failure of a transfer after `done` of `count` bytes."""

    def __init__(self, error: OSError, done: int, count: int) -> None:
        super().__init__(error.errno or 0, error.strerror)
        self.done, self.count = done, count


def whole_pages(count: int) -> int:
    """Return the size in bytes of the pages that hold `count` bytes."""
    return -(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def transfer(direction: Direction, fd: int, offset: int, data: Bytes) -> None:
    """Write all of `data` to a file at `offset`, or fill it from there; raises TransferError.

    A write fills the last page with zeros. For a read, the file may end where `data` ends.
    """
    at = data.size - data.size % ALIGNMENT_BYTES
    whole, rest = data[:at], data[at:]
    parts = [whole, _page(rest)] if rest.size else [whole]
    _move(direction, fd, offset, parts, data.size)
    if direction is Direction.READ:
        rest[:] = parts[-1][: rest.size]


def _move(direction: Direction, fd: int, offset: int, parts: list[Bytes], needed: int) -> None:
    """Move whole pages between consecutive `parts` and the file at `offset` until `needed` bytes have moved."""
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
    """Return the rest of `parts` after `done` bytes."""
    left = []
    for part in parts:
        if part.size > done:
            left.append(part[done:].data)
        done = max(0, done - part.size)
    return left


def _page(start: Bytes) -> Bytes:
    """Return an aligned page that begins with `start`, followed by zeros."""
    page: Bytes = np.frombuffer(mmap.mmap(-1, ALIGNMENT_BYTES), np.uint8)
    page[: start.size] = start
    return page


def make_direct(fd: int, direction: Direction = Direction.WRITE) -> bool:
    """Enable direct I/O on a file, and return whether its file system supports it; otherwise direct I/O stays disabled.

    The test transfer overwrites the first page with zeros, if its direction is WRITE.
    """
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
