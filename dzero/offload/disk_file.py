"""Scratch file of one path: blocks transferred by direct I/O (`offload/direct_io.py`), and their bytes and time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock

from dzero.offload.direct_io import Bytes, Direction, TransferError, make_direct, transfer, whole_pages
from dzero.offload.scratch_dir import ScratchDir
from dzero.utils.scratch_paths import DiskError, reported_as_disk_error


@dataclass(frozen=True)
class DiskUse:
    """Bytes that one path moved in one direction, in whole pages, and seconds with a transfer in progress."""

    moved_bytes: int = 0
    busy_s: float = 0.0


class DiskFile:
    """Scratch file of `needed_bytes` on `path`, in a run directory of its own.

    `is_direct` is False if `direct` I/O was not requested or the file system does not support it.

    Raises:
        DiskError: As from `ScratchDir`.
    """

    def __init__(self, path: str, needed_bytes: int, *, rank: int, direct: bool) -> None:
        self._meters = {direction: _TransferMeter() for direction in Direction}
        with ExitStack() as undo:
            # Released when nothing references this file any more, hence not before the last transfer has ended.
            self._folder = undo.enter_context(ScratchDir(path, needed_bytes, rank=rank))
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
        """Reserve at least `needed_bytes` in all, and keep the contents; raises DiskError as `ScratchDir` does."""
        had = self._folder.needed_bytes
        if needed_bytes > had:
            self._folder.grow(needed_bytes)
            if not had:
                self._write_first_page()

    def _write_first_page(self) -> None:
        with reported_as_disk_error(self.path, "writing a first page"):
            self.is_direct = self._direct and make_direct(self.fd)

    def move(self, direction: Direction, offset: int, data: Bytes, piece: str) -> None:
        """Write all of `data` at `offset`, or fill it from there; raises DiskError with piece, offset and size."""
        with self._meters[direction].moving(whole_pages(data.size)):
            try:
                transfer(direction, self.fd, offset, data)
            except TransferError as error:
                at, left = offset + error.done, error.count - error.done
                what = f"{direction} of piece {piece!r}, {left} bytes at offset {at} of the scratch file"
                what = f"{what}: {error.strerror}"
                raise DiskError(error.errno or 0, self.path, what, piece=piece, offset=at, count=left) from error

    def use(self, direction: Direction) -> DiskUse:
        """Return the transfers in one direction since the file was made."""
        return self._meters[direction].use()


class _TransferMeter:
    """Counter of bytes, and of seconds with a transfer in progress; overlapping transfers count once."""

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
