"""Ranks wait for one that is slow, miss one that is gone, and tell each other why."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from pool import Pool
from torch import nn
from torch.distributed.distributed_c10d import _set_pg_timeout

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError, make_mesh, shard
from dzero.checkpoint import saver
from dzero.checkpoint.errors import RankUnavailable
from dzero.checkpoint.rank_consensus import RankConsensus
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import CheckpointStore
from dzero.mesh import timeout_of_ranks

TIMEOUT_S = 1.5
LONG = 5000


@contextmanager
def short_timeout() -> Iterator[None]:
    """Of the default group."""
    before = timeout_of_ranks()
    _set_pg_timeout(timedelta(seconds=TIMEOUT_S), dist.group.WORLD)
    try:
        yield
    finally:
        _set_pg_timeout(before, dist.group.WORLD)


def agreed(rank: int, ranks: int) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with short_timeout():
        agreement = RankConsensus("runs/checkpoints")

        def slow() -> str:
            time.sleep(2 * TIMEOUT_S * rank)
            return f"rank {rank}"

        def fails() -> str:
            if rank == 1:
                raise OSError("no such disk")
            return ""

        began_s = time.monotonic()
        seen["slow"] = agreement.agree(slow)
        seen["slow_s"] = time.monotonic() - began_s
        try:
            agreement.agree(fails)
        except (OSError, CheckpointError) as error:
            seen["failed"] = repr(error)
        seen["after"] = agreement.agree()
        seen["long"] = [len(said) for said in agreement.agree(lambda: "é" * LONG)]
        began_s = time.monotonic()
        if rank == 0:
            try:
                agreement.agree()
            except RankUnavailable as error:
                seen["hung"] = str(error)
        else:
            time.sleep(3 * TIMEOUT_S)
        seen["hung_s"] = time.monotonic() - began_s
        agreement.close()
    return seen


def test_slow_failing_and_hung_ranks(pool: Pool) -> None:
    first, second = pool.run(agreed, 2)
    assert first["slow"] == second["slow"] == ["rank 0", "rank 1"]
    assert first["slow_s"] > TIMEOUT_S  # the ranks do not begin at once, so not twice
    assert first["failed"] == "CheckpointError('rank 1: OSError: no such disk')"
    assert second["failed"] == "OSError('no such disk')"
    assert first["after"] == second["after"] == ["", ""]
    assert first["long"] == second["long"] == [LONG, LONG]  # a message is never cut
    assert first["hung"].startswith("runs/checkpoints: a rank is gone: ")
    assert TIMEOUT_S * 0.9 < first["hung_s"] < 3 * TIMEOUT_S


def timeouts(rank: int, ranks: int) -> list[timedelta]:
    with short_timeout():
        mesh = make_mesh("cpu", replicate=2)
        groups = [mesh.get_group(axis) for axis in ("replicate", "shard")]
        return [group._get_backend(group._device_types[0]).options._timeout for group in groups]


def test_the_groups_of_a_mesh_wait_as_long_as_the_default_group(pool: Pool) -> None:
    for found in pool.run(timeouts, 4):
        assert found == [timedelta(seconds=TIMEOUT_S)] * 2


def saved_faster_than_written(rank: int, ranks: int, folder: Path) -> list[int]:
    """Save two steps, while rank 0 takes long between what ranks agree on; steps that are there and whole."""
    really = saver.Manifest

    def late(*args: Any) -> Any:
        time.sleep(4)
        return really(*args)

    sharded = shard(nn.BatchNorm1d(4), stage=2, precision="fp32")
    with (
        mock.patch.object(saver, "Manifest", late if rank == 0 else really),
        Checkpointer(CheckpointConfig(folder=str(folder)), sharded, AdamW(sharded)) as checkpoints,
    ):
        for step in (1, 2):
            checkpoints.save(step, extra={})
            time.sleep(2)  # the other rank is through with the first, unless rank 0 must tell it something
    steps = []
    for name in CheckpointStore(folder).names():
        with Checkpoint(folder / name) as checkpoint:
            assert sum(checkpoint.verify()) > 0
            steps.append(checkpoint.manifest.step)
    return steps


def test_what_a_save_asks_the_ranks_waits_for_the_save_before(pool: Pool, tmp_path: Path) -> None:
    """Else what one rank asks for the second save meets what another does for the first."""
    for steps in pool.run(saved_faster_than_written, 2, tmp_path):
        assert sorted(steps) == [1, 2]
