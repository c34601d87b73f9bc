"""Reads the ranks' files: only the blocks that hold what is wanted, each verified before a byte of it is used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from queue import SimpleQueue
from types import TracebackType

import torch

from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.folder import Folder, told
from dzero.checkpoint.format import Index, data_name, digest
from dzero.offload.direct import Direction, make_direct, transfer, whole_pages
from dzero.offload.pinned import Arena

THREADS = 4
STRIDE = 16
"""Blocks that are verified before the next ones are asked for."""

Want = tuple[int, torch.Tensor]
"""Where it starts in the file's data, and the uint8 tensor on the CPU to fill from there."""
Block = tuple[int, int]
"""Of which rank's file, and its number there."""


class Files:
    """The files of `indexes`, by rank, in `folder`; their sizes are checked now, they are opened when first needed.

    Raises CheckpointError for a file that is missing or of another size, and for a block that is damaged.
    """

    def __init__(self, folder: Folder, indexes: Mapping[int, Index]) -> None:
        self._folder, self._indexes = folder, indexes
        self._fds: dict[int, int] = {}
        self._last: tuple[Block, torch.Tensor] | None = None
        most = max(min(index.block_bytes, index.file_bytes) for index in indexes.values())
        arena = Arena((THREADS + 2) * whole_pages(most))
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for number in range(THREADS):
            self._free.put(arena.lease(most, f"block {number}").data)
        self._kept = [arena.lease(most, f"kept {number}").data for number in range(2)]
        self._undo = ExitStack()
        self._pool = self._undo.enter_context(ThreadPoolExecutor(THREADS, "checkpoint read"))

    def __enter__(self) -> Files:
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
        self._serve_all(by_block)

    def verify(self, rank: int) -> None:
        """Read all of a file. Raises CheckpointError for the first block that is not what was written."""
        for _ in self.verifying(rank):
            pass

    def verifying(self, rank: int) -> Iterator[int]:
        """As `verify`, some blocks at a time; yields the bytes of them."""
        index = self._indexes[rank]
        for first in range(0, len(index.sums), STRIDE):
            last = min(first + STRIDE, len(index.sums))
            self._serve_all({(rank, number): [] for number in range(first, last)})
            yield min(last * index.block_bytes, index.file_bytes) - first * index.block_bytes

    def _serve_all(self, by_block: Mapping[Block, Sequence[Want]]) -> None:
        blocks = sorted(by_block)
        for rank in {rank for rank, _ in blocks}:
            self._open(rank)
        ends = [self._pool.submit(self._serve, b, by_block[b], keep=b == blocks[-1]) for b in blocks]
        try:
            for end in ends:
                if (last := end.result()) is not None:
                    self._last = last  # where the next read goes on
                    self._kept.reverse()
        finally:  # after an error nobody reads on, from a file that is closed by then
            for end in ends:
                end.cancel()
            wait(ends)

    def _serve(self, block: Block, wanted: Sequence[Want], *, keep: bool) -> tuple[Block, torch.Tensor] | None:
        """Copy what is wanted out of a block; the block, if it is to be kept."""
        rank, number = block
        index = self._indexes[rank]
        begin = number * index.block_bytes
        if self._last is not None and self._last[0] == block and wanted:
            _copy(self._last[1], begin, wanted)
            return None
        room = self._free.get()
        try:
            data = room[: min(index.block_bytes, index.file_bytes - begin)]
            self._fill(data, rank, number, begin)
            _copy(data, begin, wanted)
            if not (keep and wanted):
                return None
            # Beside the block kept before, which another thread may still copy from.
            return block, self._kept[1][: data.numel()].copy_(data)
        finally:
            self._free.put(room)

    def _fill(self, block: torch.Tensor, rank: int, number: int, begin: int) -> None:
        data, path, sums = block.numpy(), self._folder.path / data_name(rank), self._indexes[rank].sums
        with told(path):
            transfer(Direction.READ, self._fds[rank], begin, data)
        if (found := digest(data.data)) != sums[number]:
            raise CheckpointError(
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
        with told(path):
            make_direct(fd, Direction.READ)
        self._fds[rank] = fd

    def check_size(self, rank: int) -> None:
        """Raises CheckpointError for a file that is missing, or of another size."""
        said = self._indexes[rank].file_bytes
        if (size := self._folder.size(data_name(rank))) != said:
            what = f"{size} bytes, its index says {said}: it was cut short, or is another file; take another checkpoint"
            raise CheckpointError(str(self._folder.path / data_name(rank)), what)


def _copy(block: torch.Tensor, begin: int, wanted: Sequence[Want]) -> None:
    """Out of the file's bytes from `begin` on."""
    for first, out in wanted:
        low, high = max(first, begin), min(first + out.numel(), begin + block.numel())
        out[low - first : high - first].copy_(block[low - begin : high - begin])
