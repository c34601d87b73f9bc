"""Ranks do something each, and agree on whether all of them could; over a gloo group of their own, beside training.

    the caller's thread          the agreement's thread
    do()                         every few seconds: tell the others that this rank is busy, and hear of them
    its result, or its error --> tell it; go on until nobody is busy
    all results, or an error <--

So a rank may take as long as it needs, and one that died or hangs is still missed within the group's timeout.
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
"""Seconds between two signs of life, and at least how many fit into the timeout."""


class _Row(NamedTuple):
    """What a rank tells: its result, or why it has none."""

    busy: bool
    say: str
    why: str


class RankConsensus:
    """Every rank makes one, in the same order as other groups. `what`: for errors."""

    def __init__(self, what: str) -> None:
        self._what = what
        timeout = timeout_of_ranks()
        self._beat_s = min(BEAT_S, timeout.total_seconds() / BEATS)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._thread = ThreadPoolExecutor(1, "checkpoint agreement")

    def agree(self, do: Callable[[], str] = str) -> list[str]:
        """Every rank's `do()`, of which `SAY_BYTES` count; rank by rank. Collective.

        Raises this rank's own error, or CheckpointError where another rank has one, NoAnswer where one is gone.
        """
        mine: Future[str] = Future()
        told = self._thread.submit(self._tell, mine)
        try:
            mine.set_result(do())
        except BaseException as error:  # the others wait for an answer, whatever it is
            mine.set_exception(error)
            wait([told])
            raise
        return told.result()

    def close(self) -> None:
        """Leave the group."""
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
