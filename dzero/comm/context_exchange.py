"""What attention moves where sequences are cut: inside forward and backward, counted under the phase `context`.

    call      a rank gives         and gets                          sends                 in the ledger
    gather    part                 [ranks, *part]                    (ranks - 1) * part    all_gather
    turn      [ranks, *part]       [ranks, *part], one from each     (ranks - 1) * part    all_to_all
    add       [ranks, *part]       part, the sum over ranks          (ranks - 1) * part    reduce_scatter
    ring      part                 torch moves it (parallel/context/ring.py) of each hop a part    permute

Sums are made here, in fp32 (fp64 of fp64), and rounded once. Every call returns when its result may be used.
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
    """One axis, over which every sequence is cut."""

    def __init__(self, exchange: AxisReduction, rank: int, axis: str, ledger: Ledger) -> None:
        self.rank, self.ranks = rank, exchange.ranks
        self._exchange, self._axis, self._ledger = exchange, axis, ledger

    def gather(self, part: Tensor) -> Tensor:
        """part [...], as large on every rank -> [ranks, ...]."""
        gathered = part.new_empty(self.ranks, *part.shape)
        self._move("all_gather", gathered, part.contiguous())
        return gathered

    def turn(self, parts: Tensor) -> Tensor:
        """parts [ranks, ...], part r for rank r -> [ranks, ...], part r from rank r."""
        return self._turned("all_to_all", parts)

    def add(self, parts: Tensor) -> Tensor:
        """parts [ranks, ...], part r for rank r -> [...], the sum of what all ranks have for this one."""
        received = self._turned("reduce_scatter", parts)
        return received.sum(0, dtype=torch.promote_types(parts.dtype, torch.float32)).to(parts.dtype)

    @property
    def group(self) -> dist.ProcessGroup:
        """Of the axis's ranks."""
        return self._exchange.group

    @contextmanager
    def ring(self, part: Tensor, hops: Sequence[tuple[torch.dtype, int]]) -> Iterator[None]:
        """What is done inside sends two of `part`, keys and values, from each rank to the next: so many times in each
        dtype."""
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
