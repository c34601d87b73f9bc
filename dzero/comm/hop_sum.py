"""Averages of quantized payloads, and of any payloads over many ranks, by the routes of comm/hops.py.

    hop 1    parts -> payloads [inner, outer, bytes] -> fp32 sums over the group, [outer, elements]
    hop 2    sums -> payloads [outer, bytes] -> fp32 sum over the groups -> times 1/ranks, rounded once

Payloads of both hops are quantized once each, or the first is in the wire's dtype and the second in fp32. Sums are made
piece by piece, and the first hop of piece k + 1 travels while piece k is summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle

import torch
import torch.distributed as dist

from dzero.comm.hops import Hops
from dzero.comm.messages import swap
from dzero.comm.residuals import Residuals, encode
from dzero.comm.wire import Blocks, Plain, Wire

ALIGNED_BYTES = 16
"""Each buffer begins at a multiple of this many bytes."""


@dataclass(frozen=True)
class Piece:
    """Consecutive elements of a part, with the formats of their payloads in the two hops."""

    start: int
    first: Blocks | Plain
    second: Blocks | Plain


def pieces_of(wire: Wire, elems: int, hops: Hops, most_bytes: int) -> tuple[Piece, ...]:
    """Return the pieces of a part of `elems` elements whose staging takes about `most_bytes` bytes."""
    many = Blocks(((1 << 20, False),), wire.code) if isinstance(wire, Blocks) else Plain(1 << 20, wire)
    second = many if isinstance(many, Blocks) else Plain(1 << 20, torch.float32)
    return _pieces(wire, elems, max(1, (most_bytes << 20) // staged_bytes((Piece(0, many, second),), hops)))


@lru_cache(maxsize=1024)
def _pieces(wire: Wire, elems: int, most: int) -> tuple[Piece, ...]:
    if isinstance(wire, Blocks):
        return tuple(Piece(start, piece, piece) for start, piece in wire.cut(most))
    cuts = [(start, min(most, elems - start)) for start in range(0, elems, most)]
    return tuple(Piece(start, Plain(size, wire), Plain(size, torch.float32)) for start, size in cuts)


def staged_bytes(pieces: Sequence[Piece], hops: Hops) -> int:
    """Return the bytes of staging: two buffers of hop 1, the sums, and a buffer of hop 2, of the largest pieces."""
    first, elems, second = _largest(pieces)
    rows = _aligned(hops.inner * hops.outer * first)
    return 4 * rows + _aligned(4 * hops.outer * elems) + (2 * _aligned(hops.outer * second) if hops.outer > 1 else 0)


def _largest(pieces: Sequence[Piece]) -> tuple[int, int, int]:
    """Return the most bytes of hop 1, elements, and bytes of hop 2."""
    return (
        max(piece.first.nbytes for piece in pieces),
        max(piece.first.elems for piece in pieces),
        max(piece.second.nbytes for piece in pieces),
    )


class HopSum:
    """Average of one buffer over the ranks of a group.

    Args:
        group: Process group of the axis.
        hops: Route over its ranks.
        pieces: Pieces of a part.
        staging: Memory for payloads and sums, uint8 [`staged_bytes`].
        residuals: What rounding left of the last payloads; None without error feedback.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        hops: Hops,
        pieces: Sequence[Piece],
        staging: torch.Tensor,
        residuals: Residuals | None = None,
    ) -> None:
        self._residuals = residuals
        self._group, self._hops, self._pieces = group, hops, pieces
        self._ranks, rank = hops.inner * hops.outer, group.rank()
        self._rank, self._place, self._at = rank, rank % hops.inner, rank // hops.inner
        first, elems, second = _largest(pieces)
        taken = _Taken(staging)
        self._buffers = cycle([[taken.take(self._ranks * first) for _ in range(2)] for _ in range(2)])
        self._sums = taken.take(4 * hops.outer * elems).view(torch.float32)
        self._second = [taken.take(hops.outer * second) for _ in range(2)] if hops.outer > 1 else []

    def average(self, output: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        """Write the average of this rank's part to `output` [n]; `parts` are this rank's payloads for each owner."""
        arriving = self._post(self._pieces[0], parts)
        for piece, later in zip(self._pieces, [*self._pieces[1:], None], strict=True):
            works, outgoing, incoming = arriving
            if later is not None:
                arriving = self._post(later, parts)
            for work in works:
                work.wait()
            sums = self._sums[: self._hops.outer * piece.first.elems].view(self._hops.outer, -1)
            for owner, total in enumerate(sums):
                rows = [(outgoing if g == self._place else incoming)[g, owner] for g in range(self._hops.inner)]
                _add_up(piece.first, rows, total)
            total = self._over_groups(piece, sums) if self._second else sums[0]
            into = output[piece.start : piece.start + piece.first.elems]
            into.copy_(total[: into.numel()].mul_(1.0 / self._ranks))

    def _post(self, piece: Piece, parts: Sequence[torch.Tensor]) -> tuple[list[dist.Work], torch.Tensor, torch.Tensor]:
        """Start hop 1 of a piece; return the works, and the payloads [inner, outer, bytes] sent and received."""
        shape = (self._hops.inner, self._hops.outer, piece.first.nbytes)
        outgoing, incoming = (buffer[: math.prod(shape)].view(shape) for buffer in next(self._buffers))
        for owner, part in enumerate(parts):
            row = outgoing[owner % self._hops.inner, owner // self._hops.inner]
            within = slice(piece.start, piece.start + piece.first.elems)
            left = None if self._residuals is None else self._residuals.first[owner, within]
            encode(piece.first, part[within], row, left)
        send, receive = ([rows[r % self._hops.inner] for r in range(self._ranks)] for rows in (outgoing, incoming))
        works = swap(self._group, send=send, receive=receive, ranks=self._hops.inside(self._rank))
        return works, outgoing, incoming

    def _over_groups(self, piece: Piece, sums: torch.Tensor) -> torch.Tensor:
        """Return the sum over the groups of this rank's part, from `sums` [outer, elements] of this group."""
        shape = (self._hops.outer, piece.second.nbytes)
        outgoing, incoming = (buffer[: math.prod(shape)].view(shape) for buffer in self._second)
        for group, (row, total) in enumerate(zip(outgoing, sums, strict=True)):
            left = None if self._residuals is None else self._residuals.second[group, piece.start :][: total.numel()]
            encode(piece.second, total, row, left)
        send, receive = ([rows[r // self._hops.inner] for r in range(self._ranks)] for rows in (outgoing, incoming))
        for work in swap(self._group, send=send, receive=receive, ranks=self._hops.across(self._rank)):
            work.wait()
        rows = [(outgoing if h == self._at else incoming)[h] for h in range(self._hops.outer)]
        _add_up(piece.second, rows, sums[0])
        return sums[0]


def _add_up(form: Blocks | Plain, rows: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Write the sum of the payloads `rows`, in order, to `total`, fp32 [elements]."""
    form.decode(rows[0], total)
    for row in rows[1:]:
        form.add(row, total)


class _Taken:
    """Consecutive parts of a buffer, each aligned."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self._end = buffer, 0

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the next `nbytes` bytes."""
        start, self._end = self._end, self._end + _aligned(nbytes)
        return self._buffer[start : start + nbytes]


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
