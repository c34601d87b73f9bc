"""Scratch store of the disk tier: named pieces of bytes on one or several paths.

    disk            `DiskStore`: pieces by name, in blocks over all paths, with a checksum per block in memory
    striping        location of each block
    disk_transfer   transfers of blocks and pieces
    disk_file       the scratch file of one path, with direct I/O
    scratch_dir     its private, locked directory, and the space reserved before the first step

The caller is responsible for order: between a write and a read of one piece, or two writes, the first future must have
ended. (The schedule executor orders them by slots.) A piece whose write is in progress or failed counts as never
written. Transfers of different pieces run concurrently: each path has threads of its own, and reads do not queue behind
writes.

The store is scratch space only. Everything is deleted when the store is closed or collected, or when its process ends.
After a signal that Python does not turn into an exception (SIGTERM by default, SIGKILL) the space is free at once, and
a directory with a lock file of a few bytes stays until the next run on that path.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress

import numpy as np
import torch

from dzero.hardware import format_bytes
from dzero.offload.direct_io import Bytes, Direction
from dzero.offload.disk_file import DiskFile, DiskUse
from dzero.offload.disk_transfer import BlockTransfer, PieceTransfer
from dzero.offload.memory_pool import ALIGNMENT_BYTES
from dzero.offload.striping import stripe
from dzero.zero.offload_config import DiskConfig


class DiskStore:
    """Store of named pieces, whose space is reserved before anything is written.

    Args:
        config: Paths and transfer settings. Paths without weights get equal ones.
        sizes: Size in bytes of each piece; `add` reserves more.
        rank: This rank, for names of directories and for messages.
        selection: How the paths were selected, for the log; empty if they are all paths.

    Raises:
        DiskError: A path cannot be used or has too little space.
        ValueError: Two paths are the same directory.
    """

    def __init__(self, config: DiskConfig, sizes: Mapping[str, int], *, rank: int = 0, selection: str = "") -> None:
        self._weights = config.weights or [1.0] * len(config.paths)
        _require_different(config.paths)
        self.config, self.sizes, self._selection = config, dict(sizes), selection
        self.striping = stripe(self.sizes, config.block_bytes, self._weights)
        self._sums: dict[str, list[int | None]] = {p: [None] * len(b) for p, b in self.striping.pieces.items()}
        with ExitStack() as undo:
            self.files = [
                undo.enter_context(DiskFile(path, count, rank=rank, direct=config.direct))
                for path, count in zip(config.paths, self.striping.file_bytes, strict=True)
            ]
            undo.pop_all()
        self._warn_of_buffering([])
        # Threads do not reference the store: if it is dropped without `close`, it ends after its started transfers.
        self._threads = [
            {way: ThreadPoolExecutor(config.threads, f"disk {index} {way}") for way in Direction}
            for index in range(len(self.files))
        ]

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, size: int) -> None:
        """Reserve space for one more piece; raises as the constructor, and ValueError for a name that exists."""
        if name in self.sizes:
            raise ValueError(f"piece {name!r} is there already, of {self.sizes[name]} bytes: add it under another name")
        sizes = {**self.sizes, name: size}
        striping = stripe(sizes, self.config.block_bytes, self._weights)  # the new piece is last: the others stay
        buffered = self._buffered()
        for file, count in zip(self.files, striping.file_bytes, strict=True):
            file.grow(count)
        self._warn_of_buffering(buffered)
        self._sums[name] = [None] * len(striping.pieces[name])
        self.striping, self.sizes = striping, sizes

    def write(self, name: str, buffer: torch.Tensor | Bytes) -> Future[None]:
        """Start writing a piece, and return a future that raises DiskError if the write fails.

        Args:
            name: Name of the piece.
            buffer: uint8 [size of the piece], 4096-aligned. It must not change until the future has ended.

        Raises:
            ValueError: The name is unknown, or the buffer has the wrong size, dtype or alignment.
        """
        data = self._bytes_of(name, buffer)
        self._sums[name][:] = [None] * len(self._sums[name])
        return self._start(Direction.WRITE, name, data)

    def read(self, name: str, buffer: torch.Tensor | Bytes) -> Future[None]:
        """Start reading a piece, and return a future that raises DiskError if the read fails.

        The errno is EBADMSG if a block differs from what was written.

        Args:
            name: Name of the piece.
            buffer: uint8 [size of the piece], 4096-aligned. It is undefined until the future has ended.

        Raises:
            ValueError: The name is unknown, or the buffer is read-only or has the wrong size, dtype or alignment.
            RuntimeError: The piece is not on disk.
        """
        data = self._bytes_of(name, buffer)
        if not data.flags.writeable:
            raise ValueError(f"piece {name!r}: the buffer is read-only")
        if None in self._sums[name]:
            raise RuntimeError(f"piece {name!r} is not on disk: it was never written, or not to the end")
        return self._start(Direction.READ, name, data)

    def use(self) -> dict[str, dict[Direction, DiskUse]]:
        """Return the bytes moved and the busy seconds since the start, by path and direction; writes wear the disk."""
        return {file.path: {way: file.use(way) for way in Direction} for file in self.files}

    def describe(self) -> str:
        """Return a line for the log: the selection and the proportion of data on each path, and the I/O settings."""
        dealt = self.striping.file_bytes if any(self.striping.file_bytes) else self._weights
        whole = sum(dealt)
        files = zip(self.files, dealt, strict=True)
        shares = ", ".join(f"{file.path} ({count / whole:.0%})" for file, count in files)
        direct = "direct I/O" if all(file.is_direct for file in self.files) else "through the page cache"
        checked = "checksums verified" if self.config.checksum else "no checksums"
        selected = f"{self._selection}: " if self._selection else ""
        return f"{selected}{shares}; {direct}, blocks of {format_bytes(self.config.block_bytes)}, {checked}"

    def close(self) -> None:
        """Wait for started transfers, then release all space; has no effect the second time."""
        for threads in self._threads:
            for pool in threads.values():
                pool.shutdown()
        for file in self.files:
            file.close()

    def _buffered(self) -> list[str]:
        return [file.path for file in self.files if self.config.direct and not file.is_direct]

    def _warn_of_buffering(self, told: Sequence[str]) -> None:
        if paths := [path for path in self._buffered() if path not in told]:
            warnings.warn(
                f"no direct I/O on {', '.join(paths)}: transfers go through the page cache, slower, and take host "
                "memory that offload means to free; choose a local disk, or say direct=false to accept it",
                stacklevel=4,
            )

    def _bytes_of(self, name: str, buffer: torch.Tensor | Bytes) -> Bytes:
        if name not in self.sizes:
            raise ValueError(f"no piece is called {name!r}; the store has {len(self.sizes)}: {sorted(self.sizes)[:9]}")
        data: Bytes = buffer.numpy() if isinstance(buffer, torch.Tensor) else buffer
        if data.dtype != np.uint8 or data.shape != (self.sizes[name],) or not data.flags.c_contiguous:
            raise ValueError(
                f"piece {name!r}: the buffer is {data.dtype} {list(data.shape)}; give uint8 [{self.sizes[name]}], "
                "contiguous"
            )
        if data.size and data.ctypes.data % ALIGNMENT_BYTES:
            raise ValueError(
                f"piece {name!r}: the buffer starts {data.ctypes.data % ALIGNMENT_BYTES} bytes past a multiple of "
                f"{ALIGNMENT_BYTES}: lease it from a HostMemoryPool"
            )
        return data

    def _start(self, way: Direction, name: str, data: Bytes) -> Future[None]:
        blocks, sums = self.striping.pieces[name], self._sums[name]
        transfer = PieceTransfer(len(blocks))
        for index, block in enumerate(blocks):
            part = data[block.start : block.start + block.count]
            move = BlockTransfer(self.files[block.path], block.offset, part, name, sums, index, self.config.checksum)
            work = move.write if way is Direction.WRITE else move.read
            self._threads[block.path][way].submit(transfer.run, work)
        return transfer.future


def _require_different(paths: Sequence[str]) -> None:
    """Raise ValueError if two paths are one directory; a missing one is reported when it is opened."""
    seen: dict[tuple[int, int], str] = {}
    for path in paths:
        with suppress(OSError):
            found = os.stat(path)
            first = seen.setdefault((found.st_dev, found.st_ino), path)
            if first is not path:
                raise ValueError(f"paths {first} and {path} are one directory: name one per disk")
