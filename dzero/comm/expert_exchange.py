"""Collectives of ranks that share experts, in forward and backward; the ledger's phase is `experts`.

    call           input of a rank           output                          a rank sends                     ledger
    counts         [ranks, n] int64          [ranks, n], row r from rank r   8 n (ranks - 1)                  all_to_all
    rows           give[r] rows for rank r   take[r] rows from rank r        its rows for other ranks         all_to_all
    SumOverRanks   integers [n]              their sum over all ranks        out and back, 8 n / ranks each   all_reduce

Rows are ordered by rank, and rows of one rank keep their order. Every call returns when its result may be used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dzero.comm.collective_log import Collective
from dzero.comm.ledger import Entry, Ledger, Traffic, dtype_key
from dzero.comm.spans import span

PHASE = "experts"


class ExpertExchange:
    """Collectives along one axis whose ranks share experts."""

    def __init__(self, group: dist.ProcessGroup, axis: str, ledger: Ledger) -> None:
        self.ranks, self.rank = group.size(), group.rank()
        self._group, self._axis, self._ledger = group, axis, ledger

    def counts(self, given: Tensor) -> Tensor:
        """Send row r of `given` [ranks, n] to rank r; return [ranks, n] with row r from rank r."""
        given = given.contiguous()
        taken = torch.empty_like(given)
        self._move(taken, given, None, None, (self.ranks - 1) * given[0].nbytes)
        return taken

    def rows(self, given: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Exchange rows, as many as `give` and `take` say for each rank; a rank may give or take none.

        Args:
            given: [sum(give), ...], ordered by receiving rank.
            give: Number of rows for each rank.
            take: Number of rows from each rank.

        Returns:
            [sum(take), ...], ordered by sending rank.
        """
        given = given.contiguous()
        taken = given.new_empty(sum(take), *given.shape[1:])
        away = sum(give) - give[self.rank]
        self._move(taken, given, [*take], [*give], away * given.shape[1:].numel() * given.element_size())
        return taken

    def _move(self, taken: Tensor, given: Tensor, take: list[int] | None, give: list[int] | None, sent: int) -> None:
        # Numbers of rows differ between ranks, but collective logs must not: so the size of one row is logged.
        begun = Collective("all_to_all", "experts", self._axis, given.shape[1:].numel(), given.dtype)
        whole, parts = (each.flatten(1).view(torch.uint8) for each in (taken, given))  # gloo lacks some dtypes
        with span("all_to_all experts"), self._ledger.collective_log.within(begun, self._group):
            dist.all_to_all_single(whole, parts, take, give, group=self._group)
        self._ledger.record(PHASE, "all_to_all", self._axis, given.dtype, sent)


class SumOverRanks:
    """Sums integers over all ranks of some axes exactly, so that all ranks have the same sums."""

    def __init__(self, groups: dict[str, dist.ProcessGroup], ledger: Ledger) -> None:
        self._groups = {axis: group for axis, group in groups.items() if group.size() > 1}
        self._ledger = ledger

    def __call__(self, numbers: Tensor) -> None:
        """Sum int64 `numbers` [n] in place."""
        for axis, group in self._groups.items():
            begun = Collective("all_reduce", "loads", axis, numbers.numel(), numbers.dtype)
            with self._ledger.collective_log.within(begun, group):
                dist.all_reduce(numbers, group=group)
            self._ledger.record(PHASE, "all_reduce", axis, numbers.dtype, self._sent_bytes(numbers.numel(), group))

    def expected(self, numbers: int) -> dict[Entry, Traffic]:
        """Return calls and sent bytes of one call, by ledger entry."""
        return {
            Entry(PHASE, "all_reduce", axis, dtype_key(torch.int64)): Traffic(1, self._sent_bytes(numbers, group))
            for axis, group in self._groups.items()
        }

    @staticmethod
    def _sent_bytes(numbers: int, group: dist.ProcessGroup) -> int:
        return (group.size() - 1) * -(-numbers // group.size()) * 2 * torch.int64.itemsize
