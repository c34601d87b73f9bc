"""Reads of the ranks' data files in blocks; each block is verified before any of its bytes are used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack

import torch

from dzero.checkpoint.errors import CheckpointDamaged, reported_as_checkpoint_error
from dzero.checkpoint.format import FileIndex, data_name, digest
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.store import Directory
from dzero.offload.direct_io import Direction, make_direct, transfer

THREADS = 4

Want = tuple[int, torch.Tensor]
"""Start offset in the file's data section, and the uint8 CPU tensor to fill from there."""
Block = tuple[int, int]
"""Rank that wrote the file, and number of the block in that file."""


class BlockReader:
    """Reader of the data files that `indexes` describes by rank; it opens and size-checks them on first use.

    It reads through `buffers`, each at least as large as the largest block, or through its own. Methods raise
    `CheckpointError` if a file is missing or has another size, or if a block is damaged.
    """

    def __init__(self, folder: Directory, indexes: Mapping[int, FileIndex], buffers: IOBuffers | None = None) -> None:
        self._folder, self._indexes, self._buffers = folder, indexes, buffers
        self._fds: dict[int, int] = {}
        self._kept: tuple[Block, torch.Tensor] | None = None
        self._undo = ExitStack()
        self._pool = self._undo.enter_context(ThreadPoolExecutor(THREADS, "checkpoint read"))

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def read(self, wanted: Mapping[int, Sequence[Want]]) -> None:
        """Fill all tensors of `wanted`, by rank, reading every block once."""
        by_block: dict[Block, list[Want]] = {}
        for rank, wants in wanted.items():
            index = self._indexes[rank]
            for start, out in wants:
                first, size = index.data_start + start, index.block_bytes
                for number in range(first // size, -(-(first + out.numel()) // size) if out.numel() else 0):
                    by_block.setdefault((rank, number), []).append((first, out))
        for _ in self._serve_all(by_block, keep=True):
            pass

    def verify(self, rank: int) -> Iterator[int]:
        """Read all of a rank's file and yield the bytes of each block; raise for the first damaged one."""
        return self._serve_all({(rank, number): [] for number in range(len(self._indexes[rank].sums))}, keep=False)

    def _serve_all(self, by_block: Mapping[Block, Sequence[Want]], *, keep: bool) -> Iterator[int]:
        """Copy the wanted bytes out of each block and yield its size; keep the last block if `keep`."""
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
        finally:  # no thread may still read after an error, when the caller closes the files
            for end in ends:
                end.cancel()
            wait(ends)

    def _serve(self, buffers: IOBuffers, block: Block, wanted: Sequence[Want], *, keep: bool) -> torch.Tensor | None:
        """Copy the wanted bytes out of a block; return its buffer if the block is kept."""
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
        """Return the offset of a block in its file, and its bytes."""
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
        """Raise `CheckpointError` if a rank's file is missing or its size is not that in its index."""
        said = self._indexes[rank].file_bytes
        if (size := self._folder.size(data_name(rank))) != said:
            what = f"{size} bytes, its index says {said}: it was cut short, or is another file; take another checkpoint"
            raise CheckpointDamaged(str(self._folder.path / data_name(rank)), what)


def _copy(block: torch.Tensor, begin: int, wanted: Sequence[Want]) -> None:
    """Copy the wanted bytes out of `block`, which starts at byte `begin` of the file."""
    for first, out in wanted:
        low, high = max(first, begin), min(first + out.numel(), begin + block.numel())
        out[low - first : high - first].copy_(block[low - begin : high - begin])
