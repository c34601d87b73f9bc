"""Agreement of all ranks on whether an action succeeded on each of them, over a gloo group separate from training.

    calling thread                consensus thread
    run do()                      every few seconds: exchange with all ranks that this rank is busy
    its result, or its error -->  exchange it; repeat until no rank is busy
    all results, or an error <--

A rank may therefore take as long as it needs, while the loss of a process is detected within the group's timeout.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
import torch.distributed as dist

from dzero.checkpoint.errors import CheckpointError, RankUnavailable
from dzero.mesh import timeout_of_ranks

SAY_BYTES, WHY_BYTES = 1024, 1024
BEAT_S, BEATS = 5.0, 3
"""Seconds between two heartbeats, and the minimum number of heartbeats within the timeout."""


class _Row(NamedTuple):
    """Message of a rank: that it is busy, its result, or why it has none."""

    busy: bool
    say: str
    why: str


class RankConsensus:
    """Agreement of all ranks on `what`; every rank constructs one, in the same order as other groups."""

    def __init__(self, what: str) -> None:
        self._what = what
        timeout = timeout_of_ranks()
        self._beat_s = min(BEAT_S, timeout.total_seconds() / BEATS)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint agreement")

    def agree(self, do: Callable[[], str] = str) -> list[str]:
        """Run `do` on every rank and return all results, in rank order. Collective.

        Args:
            do: Returns this rank's result, of which `SAY_BYTES` bytes are exchanged. Its error is raised on this rank.

        Raises:
            CheckpointError: If `do` raised on another rank.
            RankUnavailable: If a rank does not respond.
        """
        mine: Future[str] = Future()
        told = self._thread.submit(self._tell, mine)
        try:
            mine.set_result(do())
        except BaseException as error:  # the other ranks wait for a message, even an error
            mine.set_exception(error)
            wait([told])
            raise
        return told.result()

    def close(self) -> None:
        """Destroy the process group."""
        self._thread.shutdown()
        dist.destroy_process_group(self._group)

    def _tell(self, mine: Future[str]) -> list[str]:
        rows = [_Row(True, "", "")]
        while any(row.busy for row in rows):
            wait([mine], timeout=self._beat_s)
            rows = self._gather(_row(mine))
        for row in rows:
            if row.why:
                raise CheckpointError("", row.why)
        return [row.say for row in rows]

    def _gather(self, row: _Row) -> list[_Row]:
        mine = torch.zeros(1 + SAY_BYTES + WHY_BYTES, dtype=torch.uint8)
        mine[0] = row.busy
        for start, size, text in ((1, SAY_BYTES, row.say), (1 + SAY_BYTES, WHY_BYTES, row.why)):
            encoded = text.encode()[:size]
            mine[start : start + len(encoded)] = torch.tensor([*encoded], dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        try:
            dist.all_gather(every, mine, group=self._group)
        except RuntimeError as error:
            raise RankUnavailable(self._what, f"a rank is gone: {error}") from error
        return [_Row(bool(each[0]), _text(each[1 : 1 + SAY_BYTES]), _text(each[1 + SAY_BYTES :])) for each in every]


def _row(mine: Future[str]) -> _Row:
    if not mine.done():
        return _Row(True, "", "")
    if (error := mine.exception()) is None:
        return _Row(False, mine.result(), "")
    whose = "" if isinstance(error, CheckpointError) else f"rank {dist.get_rank()}: {type(error).__name__}: "
    return _Row(False, "", f"{whose}{error}")


def _text(data: torch.Tensor) -> str:
    return bytes(data.tolist()).rstrip(b"\0").decode(errors="replace")
