"""Transfers of the disk tier: of a block (`BlockTransfer`), and of all blocks of a piece (`PieceTransfer`).

The checksum is xxh3. It reads memory almost as fast as one core can (34 of 38 GB/s where it was measured) and releases
the interpreter lock, so that other threads keep the disk busy.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Lock

import xxhash

from dzero.offload.direct_io import Bytes, Direction
from dzero.offload.disk_file import DiskFile
from dzero.utils.scratch_paths import DiskError


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """Transfer of one block, which references the buffer and the file but not the store."""

    file: DiskFile
    offset: int
    data: Bytes
    piece: str
    sums: list[int | None]
    index: int
    checksum: bool

    def write(self) -> None:
        """Write the block and record its checksum; raises DiskError."""
        self.file.move(Direction.WRITE, self.offset, self.data, self.piece)
        # After the write: if the first blocks of a piece were summed before they are written, the disk would idle.
        self.sums[self.index] = self._digest()

    def read(self) -> None:
        """Read the block and verify its checksum; raises DiskError, with errno EBADMSG if the block was changed."""
        self.file.move(Direction.READ, self.offset, self.data, self.piece)
        if (found := self._digest()) != self.sums[self.index]:
            what = (
                f"block {self.index} of piece {self.piece!r}, {self.data.size} bytes at offset {self.offset} of the "
                f"scratch file, is not what was written (xxh3 {found:016x} for {self.sums[self.index] or 0:016x}): the "
                "disk, its cable or this memory is failing"
            )
            place, count = self.offset, self.data.size
            raise DiskError(errno.EBADMSG, self.file.path, what, piece=self.piece, offset=place, count=count)

    def _digest(self) -> int:
        return xxhash.xxh3_64_intdigest(self.data.data) if self.checksum else 0


class PieceTransfer:
    """Transfer of a piece of `blocks` blocks.

    `future` ends when no block uses the buffer any more, and raises the first error of a block.
    """

    def __init__(self, blocks: int) -> None:
        self.future: Future[None] = Future()
        self.future.set_running_or_notify_cancel()  # it cannot be cancelled
        self._left, self._lock = blocks, Lock()
        self._error: BaseException | None = None
        if not blocks:
            self.future.set_result(None)

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` for one block, unless another block has failed."""
        error: BaseException | None = None
        try:
            if self._error is None:
                work()
        except BaseException as raised:
            error = raised
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            ended = not self._left
        if ended and self._error:
            self.future.set_exception(self._error)
        elif ended:
            self.future.set_result(None)
