"""Ranks whose devices wait for each other, while the host stands in a wait of its own that names no collective."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool

from dzero import streams
from dzero.comm.collective_log import Collective, CollectiveLog
from dzero.launch import watchdog as watching
from dzero.launch import worker
from dzero.launch.watchdog import Watchdog

TIMEOUT_S = 3.0
CPU = torch.device("cpu")


class Event:
    """An event that the device has come to, or does not come to."""

    def __init__(self, is_over: bool) -> None:
        self._is_over = is_over

    def record(self, stream: object) -> None:
        """Nothing comes behind it."""

    def query(self) -> bool:
        return self._is_over


def stand(rank: int, ranks: int) -> str:
    """Rank 0's device waits in a collective that rank 1 never begins; return what rank 0's thread said."""
    module = mock.Mock(Event=lambda blocking: Event(is_over=rank != 0))
    store = dist.PrefixStore("watch", dist.distributed_c10d._get_default_store())  # torchrun's is not there
    told: list[str] = []
    with (
        mock.patch.object(streams, "device_module", return_value=module),
        mock.patch.object(watching, "rendezvous", return_value=(store, rank, ranks)),
        mock.patch.object(threading, "excepthook", lambda args: told.append(str(args.exc_value))),
        Watchdog(timedelta(seconds=TIMEOUT_S)) as watch,
    ):
        collective_log = CollectiveLog()
        collective_log.device = CPU
        watch.follow(collective_log)
        with collective_log.within(
            Collective.of("reduce_scatter", "layers.0", "shard", 64, torch.float32), dist.group.WORLD
        ):
            pass
        if rank == 0:
            with collective_log.within(
                Collective.of("all_gather", "layers.1", "shard", 64, torch.float32), dist.group.WORLD
            ):
                pass
            until_s = time.monotonic() + 20 * TIMEOUT_S
            while not told and time.monotonic() < until_s:
                time.sleep(0.05)
            store.set("rank 0 has told", "")
        else:
            while not store.check(["rank 0 has told"]):  # a wait would hold the connection that the beats need
                time.sleep(0.05)
    return told[0] if told else ""


def test_a_collective_that_the_device_waits_in_is_told_at_the_timeout(pool: Pool) -> None:
    said, _ = pool.run(stand, 2)
    assert "rank 0 got no answer in #2 all_gather of layers.1 over shard [64 x float32]" in said
    assert f"within launch.timeout_s={TIMEOUT_S:g}" in said
    assert "rank 1 (pid" in said
    assert "is behind" in said
    assert "rank 1: #1 reduce_scatter of layers.0" in said


def test_memory_of_cuda_grows_in_place_unless_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in worker.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    worker.choose_allocator()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    for name in worker.ALLOCATOR_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    worker.choose_allocator()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


SCRIPT = """
import threading, time
from dzero.errors import RunError
from dzero.launch.worker import reported

def tell():
    raise RunError("rank 1 is behind")

with reported(lambda error: print("told:", error)):
    threading.Thread(target=tell).start()
    time.sleep(60)
"""


def test_what_a_thread_tells_ends_the_worker() -> None:
    began_s = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == "told: rank 1 is behind\n"
    assert time.monotonic() - began_s < 50
