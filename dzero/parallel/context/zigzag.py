"""Zigzag split of sequences: each rank has two of 2n chunks, so that causal attention is equal work on all ranks.

    n = 4    chunk   0  1  2  3  4  5  6  7
             rank    0  1  2  3  3  2  1  0

Chunk c attends to c + 1 chunks, so the two chunks of every rank attend to 2n + 1 chunks in total.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Zigzag:
    """The part of every sequence that `rank` of `ranks` has."""

    rank: int
    ranks: int

    @property
    def chunks(self) -> tuple[int, int]:
        """Numbers of the two chunks."""
        return chunks_of(self.rank, self.ranks)

    def part(self, whole: Tensor) -> Tensor:
        """Return [batch, time / ranks, ...] of [batch, time, ...]; raise ValueError unless 2 * ranks divides time."""
        time, count = whole.shape[1], 2 * self.ranks
        if time % count:
            raise ValueError(
                f"sequences of {time} tokens over cp={self.ranks} ranks: {count} chunks do not divide them; take "
                f"{time // count * count or count} tokens"
            )
        chunks = whole.chunk(count, dim=1)
        return torch.cat([chunks[chunk] for chunk in self.chunks], dim=1)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of the `tokens` of a part in their sequence: int64 [tokens], on the CPU."""
        size = tokens // 2
        return torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in self.chunks])


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return the numbers of a rank's two chunks out of 2 * ranks."""
    return rank, 2 * ranks - 1 - rank


def joined(parts: Tensor) -> Tensor:
    """Join the parts of all ranks [ranks, ..., time, dim] in the sequence's order: [..., ranks * time, dim]."""
    first, second = zip(*(part.chunk(2, dim=-2) for part in parts), strict=True)
    return torch.cat([*first, *reversed(second)], dim=-2)


def cut(whole: Tensor, ranks: int) -> Tensor:
    """Cut [..., ranks * time, dim] into parts [ranks, ..., time, dim]; inverse of `joined`."""
    *outer, time, dim = whole.shape
    parts = whole.new_empty(ranks, *outer, time // ranks, dim)
    chunks = whole.chunk(2 * ranks, dim=-2)
    for rank, part in enumerate(parts):
        torch.cat([chunks[chunk] for chunk in chunks_of(rank, ranks)], dim=-2, out=part)
    return parts
