"""Striping: distribution of blocks to paths in proportion to the paths' weights.

    piece   A (5 blocks)   B (2)          weights 2 : 1
    path 0  A0    A2 A3       B0          each file in the order in which its blocks were assigned
    path 1     A1       A4       B1

A block is assigned to the path that is furthest behind its proportion of all bytes assigned so far, including this
block. Hence no path is ever more than one block ahead of its proportion, over all pieces and within each. A piece of a
few blocks is already read from all paths at once, and many small pieces fill all paths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dzero.offload.memory_pool import aligned


@dataclass(frozen=True, slots=True)
class StripedBlock:
    """Block of a piece.

    Attributes:
        path: Index of the path.
        offset: Position in the file of the path, a multiple of 4096.
        start: Position in the piece, a multiple of 4096.
        count: Size in bytes. The last block of a piece may end within a page, and takes the whole page on disk.
    """

    path: int
    offset: int
    start: int
    count: int


@dataclass(frozen=True)
class Striping:
    """Blocks of every piece, and the size in bytes of every path's file."""

    pieces: dict[str, tuple[StripedBlock, ...]]
    file_bytes: tuple[int, ...]


def stripe(sizes: Mapping[str, int], block_bytes: int, weights: Sequence[float]) -> Striping:
    """Distribute pieces of `sizes` bytes in blocks of `block_bytes` to `len(weights)` paths.

    Raises:
        ValueError: A size is negative, or a weight is not a positive number.
    """
    if wrong := [weight for weight in weights if not (weight > 0 and math.isfinite(weight))]:
        raise ValueError(f"weight {wrong[0]} of a path: must be a positive number (its bandwidth, in any unit)")
    if bad := [name for name, size in sizes.items() if size < 0]:
        raise ValueError(f"piece {bad[0]!r} has {sizes[bad[0]]} bytes: must be 0 or more")
    whole, dealt, ends = sum(weights), 0, [0] * len(weights)
    pieces: dict[str, tuple[StripedBlock, ...]] = {}
    for name, size in sizes.items():
        blocks = []
        for start in range(0, size, block_bytes):
            count = min(block_bytes, size - start)
            dealt += aligned(count)
            behind = [dealt * weight - end * whole for weight, end in zip(weights, ends, strict=True)]
            path = behind.index(max(behind))
            blocks.append(StripedBlock(path, ends[path], start, count))
            ends[path] += aligned(count)
        pieces[name] = tuple(blocks)
    return Striping(pieces, tuple(ends))
