"""Writer of one rank's tensors in bounded memory: threads checksum and write the buffers that tensors are copied to.

    put(name, tensor)     fill a buffer --> when full: a thread checksums and writes it, the next free one is taken
    finish()              write the last block, set the file's size, fsync; return the index

The file is a safetensors file: a header padded to a whole page, then the parts without gaps. `put` waits while all
buffers are being written, so a rank never needs more memory than these, however large its states are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import msgspec
import torch

from dzero.checkpoint.errors import reported_as_checkpoint_error
from dzero.checkpoint.format import DTYPES, FileIndex, StoredBox, data_name, digest
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.store import Directory
from dzero.offload.direct_io import Direction, make_direct, transfer, whole_pages

THREADS = 4


def laid_out(parts: Mapping[str, StoredBox]) -> dict[str, StoredBox]:
    """Return `parts` with their positions in the file, one after the other in the given order."""
    at, placed = 0, {}
    for name, part in parts.items():
        end = at + part.size_bytes
        placed[name] = msgspec.structs.replace(part, start=at, end=end)
        at = end
    return placed


def header(parts: Mapping[str, StoredBox], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return a safetensors header: its length in 8 bytes, then JSON padded with spaces to a whole page."""
    tensors: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for name, part in parts.items():
        tensors[name] = {"dtype": part.dtype, "shape": list(part.size), "data_offsets": [part.start, part.end]}
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text = text.ljust(whole_pages(8 + len(text)) - 8)
    return len(text).to_bytes(8, "little") + text


class ShardWriter:
    """Writer of one rank's file, to which all `parts` are put in order; raises `CheckpointError`."""

    def __init__(self, folder: Directory, rank: int, parts: Mapping[str, StoredBox], buffers: IOBuffers) -> None:
        self.rank, self.parts, self._buffers = rank, laid_out(parts), buffers
        self._path = folder.path / data_name(rank)
        self._due = iter(self.parts.items())
        start = header(self.parts)
        data_bytes = max((part.end for part in self.parts.values()), default=0)
        self._index = FileIndex(rank, len(start) + data_bytes, len(start), buffers.block_bytes, (), self.parts)
        self._fd = folder.open(data_name(rank), os.O_RDWR | os.O_CREAT | os.O_EXCL)
        self._pool = ThreadPoolExecutor(THREADS, "checkpoint write")
        self._under_way: list[Future[str]] = []
        self._buffer, self._filled = self._buffers.free.get(), 0
        try:
            with reported_as_checkpoint_error(self._path):
                if self._index.file_bytes:
                    os.posix_fallocate(self._fd, 0, whole_pages(self._index.file_bytes))
                make_direct(self._fd)
            self._append(torch.frombuffer(bytearray(start), dtype=torch.uint8))
        except BaseException:
            self.abandon()
            raise

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Append the next part, from any device; `tensor` may change on return. Waits while no buffer is free."""
        due, part = next(self._due, ("", None))
        if part is None:
            raise ValueError(f"{name} is one more than was laid out")
        if (name, tensor.dtype, tensor.numel()) != (due, DTYPES[part.dtype], part.box.elems):
            raise ValueError(
                f"{name}, {tensor.numel()} of {tensor.dtype}, where {due}, {part.box.elems} of {part.dtype}, is due"
            )
        self._append(tensor.detach().contiguous().view(-1).view(torch.uint8))

    def finish(self) -> FileIndex:
        """Write everything to disk except the folder's entry, and return the index."""
        if (left := next(self._due, None)) is not None:
            raise ValueError(f"{left[0]} was not put")
        if self._filled:
            self._send()
        sums = tuple(future.result() for future in self._under_way)
        with reported_as_checkpoint_error(self._path):
            os.ftruncate(self._fd, self._index.file_bytes)
            os.fsync(self._fd)
        self.abandon()
        return msgspec.structs.replace(self._index, sums=sums)

    def abandon(self) -> None:
        """Give back the buffer and close the file; further calls do nothing."""
        if self._fd >= 0:
            self._pool.shutdown()
            self._buffers.free.put(self._buffer)
            os.close(self._fd)
            self._fd = -1

    def _append(self, data: torch.Tensor) -> None:
        at = 0
        while at < data.numel():
            count = min(data.numel() - at, self._buffer.numel() - self._filled)
            self._buffer[self._filled : self._filled + count].copy_(data[at : at + count])
            at, self._filled = at + count, self._filled + count
            if self._filled == self._buffer.numel():
                self._send()

    def _send(self) -> None:
        """Start writing the current buffer, and take a free one."""
        for future in self._under_way:
            if future.done():
                future.result()  # raises a write error early
        self._under_way.append(self._pool.submit(self._write, len(self._under_way), self._buffer, self._filled))
        self._buffer, self._filled = self._buffers.free.get(), 0

    def _write(self, number: int, block: torch.Tensor, count: int) -> str:
        try:
            offset, data = number * self._buffers.block_bytes, block[:count].numpy()
            with reported_as_checkpoint_error(self._path):
                transfer(Direction.WRITE, self._fd, offset, data)
            return digest(data.data)
        finally:
            self._buffers.free.put(block)
