"""Collectives of attention over sequences that are cut, in forward and backward; the ledger's phase is `context`.

    call      input of a rank   output                               a rank sends         kind in the ledger
    gather    part              [ranks, *part]                       (ranks - 1) * part   all_gather
    turn      [ranks, *part]    [ranks, *part], one from each rank   (ranks - 1) * part   all_to_all
    add       [ranks, *part]    part, the sum over ranks             (ranks - 1) * part   reduce_scatter
    ring      part              (see parallel/context/ring.py)       2 * part per hop     permute

Sums are computed here, in fp32 (fp64 for fp64), and rounded once. Every call returns when its result may be used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dzero.comm.collective_log import Collective
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import AxisReduction
from dzero.comm.spans import span


class ContextExchange:
    """Collectives along one axis that cuts every sequence."""

    def __init__(self, exchange: AxisReduction, rank: int, axis: str, ledger: Ledger) -> None:
        self.rank, self.ranks = rank, exchange.ranks
        self._exchange, self._axis, self._ledger = exchange, axis, ledger

    def gather(self, part: Tensor) -> Tensor:
        """Gather `part` [...], of one shape on every rank, as [ranks, ...]."""
        gathered = part.new_empty(self.ranks, *part.shape)
        self._move("all_gather", gathered, part.contiguous())
        return gathered

    def turn(self, parts: Tensor) -> Tensor:
        """Send part r of `parts` [ranks, ...] to rank r; return [ranks, ...] with part r from rank r."""
        return self._turned("all_to_all", parts)

    def add(self, parts: Tensor) -> Tensor:
        """Send part r of `parts` [ranks, ...] to rank r; return [...], the sum of the parts from all ranks."""
        received = self._turned("reduce_scatter", parts)
        return received.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32)).to(parts.dtype)

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group of the axis."""
        return self._exchange.group

    @contextmanager
    def ring(self, part: Tensor, hops: Sequence[tuple[torch.dtype, int]]) -> Iterator[None]:
        """Count the ring inside: keys and values, two of `part`, go on to the next rank `hops` times per dtype."""
        begun = Collective("permute", "attention", self._axis, 2 * part.numel(), part.dtype)
        with span("ring attention"), self._ledger.collective_log.within(begun, self.group):
            yield
        for dtype, times in hops:
            for _ in range(times):
                self._ledger.record("context", "permute", self._axis, dtype, 2 * part.numel() * dtype.itemsize)

    def _turned(self, kind: str, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        self._move(kind, received, parts)
        return received

    def _move(self, kind: str, output: Tensor, given: Tensor) -> None:
        part = given if kind == "all_gather" else given[0]
        begun = Collective(kind, "attention", self._axis, part.numel(), part.dtype)
        move = self._exchange.all_gather if kind == "all_gather" else self._exchange.all_to_all
        with span(f"{kind} attention"), self._ledger.collective_log.within(begun, self._exchange.group):
            for work in move(output.view(-1), given.view(-1)):
                work.wait()
        self._ledger.record("context", kind, self._axis, part.dtype, (self.ranks - 1) * part.nbytes)
