"""Reads the ranks' files: only the blocks that hold what is wanted, each verified before a byte of it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from types import TracebackType

import torch

from dzero.checkpoint.errors import CheckpointDamaged
from dzero.checkpoint.format import FileIndex, data_name, digest
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.store import Directory, reported_as_checkpoint_error
from dzero.offload.direct_io import Direction, make_direct, transfer

THREADS = 4

Want = tuple[int, torch.Tensor]
"""Where it starts in the file's data, and the uint8 tensor on the CPU to fill from there."""
Block = tuple[int, int]
"""Of which rank's file, and its number there."""


class BlockReader:
    """The files of `indexes`, by rank, in `folder`; each is opened, and its size checked, when it is first needed.

    buffers: to read through, free and as large as every block; None for own ones. Raises CheckpointError for a file
    that is missing or of another size, and for a block that is damaged.
    """

    def __init__(self, folder: Directory, indexes: Mapping[int, FileIndex], buffers: IOBuffers | None = None) -> None:
        self._folder, self._indexes, self._buffers = folder, indexes, buffers
        self._fds: dict[int, int] = {}
        self._kept: tuple[Block, torch.Tensor] | None = None
        self._undo = ExitStack()
        self._pool = self._undo.enter_context(ThreadPoolExecutor(THREADS, "checkpoint read"))

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def read(self, wanted: Mapping[int, Sequence[Want]]) -> None:
        """Fill all of `wanted`, by rank; every block is read once."""
        by_block: dict[Block, list[Want]] = {}
        for rank, wants in wanted.items():
            index = self._indexes[rank]
            for start, out in wants:
                first, size = index.data_start + start, index.block_bytes
                for number in range(first // size, -(-(first + out.numel()) // size) if out.numel() else 0):
                    by_block.setdefault((rank, number), []).append((first, out))
        for _ in self._serve_all(by_block, keep=True):
            pass

    def verify(self, rank: int) -> None:
        """Read all of a file. Raises CheckpointError for the first block that is not what was written."""
        for _ in self.verifying(rank):
            pass

    def verifying(self, rank: int) -> Iterator[int]:
        """As `verify`, block by block; yields the bytes of each."""
        return self._serve_all({(rank, number): [] for number in range(len(self._indexes[rank].sums))}, keep=False)

    def _serve_all(self, by_block: Mapping[Block, Sequence[Want]], *, keep: bool) -> Iterator[int]:
        """Copy what is wanted out of each block, and yield its bytes. keep: the last, where the next read goes on."""
        blocks = sorted(by_block)
        for rank in {rank for rank, _ in blocks}:
            self._open(rank)
        if self._buffers is None:
            most = max(min(index.block_bytes, index.file_bytes) for index in self._indexes.values())
            self._buffers = IOBuffers(THREADS + 1, block_bytes=most)
        kept = blocks[-1] if keep and blocks else None
        ends = [self._pool.submit(self._serve, self._buffers, b, by_block[b], keep=b == kept) for b in blocks]
        try:
            for block, end in zip(blocks, ends, strict=True):
                if (buffer := end.result()) is not None:
                    if self._kept is not None:
                        self._buffers.free.put(self._kept[1])
                    self._kept = block, buffer
                yield self._span(block)[1]
        finally:  # after an error nobody reads on, from a file that is closed by then
            for end in ends:
                end.cancel()
            wait(ends)

    def _serve(self, buffers: IOBuffers, block: Block, wanted: Sequence[Want], *, keep: bool) -> torch.Tensor | None:
        """Copy what is wanted out of a block; the buffer it is in, if it is to be kept."""
        begin, count = self._span(block)
        if wanted and self._kept is not None and self._kept[0] == block:
            _copy(self._kept[1][:count], begin, wanted)
            return None
        buffer = buffers.free.get()
        try:
            self._fill(buffer[:count], *block, begin)
            _copy(buffer[:count], begin, wanted)
        except BaseException:
            buffers.free.put(buffer)
            raise
        if keep:
            return buffer
        buffers.free.put(buffer)
        return None

    def _span(self, block: Block) -> tuple[int, int]:
        """Where it begins in its file, and its bytes."""
        index = self._indexes[block[0]]
        begin = block[1] * index.block_bytes
        return begin, min(index.block_bytes, index.file_bytes - begin)

    def _fill(self, block: torch.Tensor, rank: int, number: int, begin: int) -> None:
        data, path, sums = block.numpy(), self._folder.path / data_name(rank), self._indexes[rank].sums
        with reported_as_checkpoint_error(path):
            transfer(Direction.READ, self._fds[rank], begin, data)
        if (found := digest(data.data)) != sums[number]:
            raise CheckpointDamaged(
                str(path),
                f"block {number}, {data.size} bytes at offset {begin}, is not what was written (xxh3 {found} for "
                f"{sums[number]}): the file was damaged; take another checkpoint",
            )

    def _open(self, rank: int) -> None:
        if rank in self._fds:
            return
        self.check_size(rank)
        path, fd = self._folder.path / data_name(rank), self._folder.open(data_name(rank), os.O_RDONLY)
        self._undo.callback(os.close, fd)
        with reported_as_checkpoint_error(path):
            make_direct(fd, Direction.READ)
        self._fds[rank] = fd

    def check_size(self, rank: int) -> None:
        """Raises CheckpointError for a file that is missing, or of another size."""
        said = self._indexes[rank].file_bytes
        if (size := self._folder.size(data_name(rank))) != said:
            what = f"{size} bytes, its index says {said}: it was cut short, or is another file; take another checkpoint"
            raise CheckpointDamaged(str(self._folder.path / data_name(rank)), what)


def _copy(block: torch.Tensor, begin: int, wanted: Sequence[Want]) -> None:
    """Out of the file's bytes from `begin` on."""
    for first, out in wanted:
        low, high = max(first, begin), min(first + out.numel(), begin + block.numel())
        out[low - first : high - first].copy_(block[low - begin : high - begin])
