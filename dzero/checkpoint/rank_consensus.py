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

import torch.distributed as dist

from dzero.checkpoint.errors import CheckpointError, RankUnavailable
from dzero.comm.collective_log import CollectiveLog
from dzero.comm.collectives import gather_json
from dzero.comm.watchdog import follow
from dzero.mesh import timeout_of_ranks

BEAT_S, BEATS = 5.0, 3
"""Seconds between two heartbeats, and the minimum number of heartbeats within the timeout."""
BUSY: list[str | None] = [None, None]


class RankConsensus:
    """Agreement of all ranks on `what`; every rank constructs one, in the same order as other groups."""

    def __init__(self, what: str) -> None:
        self._what = what
        timeout = timeout_of_ranks()
        self._beat_s = min(BEAT_S, timeout.total_seconds() / BEATS)
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self._group = group
        self._thread = ThreadPoolExecutor(1, "checkpoint agreement")
        self._log = CollectiveLog()
        follow(self._log)

    def agree(self, do: Callable[[], str] = str) -> list[str]:
        """Run `do` on every rank and return all results, in rank order. Collective.

        An error of `do` is raised on its rank, and as `CheckpointError` on all others. If a rank does not respond, all
        others raise `RankUnavailable`.
        """
        mine: Future[str] = Future()
        told = self._thread.submit(self._tell, mine)
        try:
            mine.set_result(do())
        except BaseException as error:  # the other ranks wait for a message, even an error
            mine.set_exception(error)
            wait([told])
            raise
        with self._log.waiting_beside(f"an agreement on {self._what}"):
            return told.result()

    def close(self) -> None:
        """Destroy the process group, unless all groups are destroyed already."""
        self._thread.shutdown()
        if dist.is_initialized():
            dist.destroy_process_group(self._group)

    def _tell(self, mine: Future[str]) -> list[str]:
        rows = [BUSY]
        while BUSY in rows:
            wait([mine], timeout=self._beat_s)
            try:
                rows = gather_json(_row(mine), self._group)
            except RuntimeError as error:
                raise RankUnavailable(self._what, f"a rank is gone: {error}") from error
        for _, why in rows:
            if why:
                raise CheckpointError("", why)
        return [say or "" for say, _ in rows]


def _row(mine: Future[str]) -> list[str | None]:
    """Return what a rank says: that it is busy, its result, or why it has none."""
    if not mine.done():
        return BUSY
    if (error := mine.exception()) is None:
        return [mine.result(), None]
    whose = "" if isinstance(error, CheckpointError) else f"rank {dist.get_rank()}: {type(error).__name__}: "
    return [None, f"{whose}{error}"]
