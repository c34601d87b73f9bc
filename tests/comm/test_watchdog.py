"""Ranks that wait for others which cannot come are told so, in a loop of one's own as under `train.py`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from warm_python import COLD

STALLS = "tests/comm/test_watchdog.py::test_a_loop_of_ones_own_that_stalls_says_who_waits_where"
SLOW_S, BUSY_S = 8, 60
"""Seconds after which ranks that all wait, and a rank that waits for one that computes, say so."""
OWN = """
import os, pathlib, subprocess, sys, threading, time
from datetime import timedelta
import dzero
import torch
import torch.distributed as dist
from torch import nn

timeout_s = float(sys.argv[1])
dist.init_process_group("gloo", **({"timeout": timedelta(seconds=timeout_s)} if timeout_s else {}))
rank = dist.get_rank()
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 8))
config = dzero.ZeroConfig(stage=3, units=lambda module: isinstance(module, nn.Linear))
sharded = dzero.shard(model, config, precision="fp32")
optim = dzero.AdamW(sharded)

def step():
    sharded.model(torch.ones(2, 8)).sum().backward()
    optim.step()
    optim.zero_grad()

step()
print("stalls", time.time(), flush=True)
THEN
step()
print("goes on", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
WAITS = r"\n  rank 1: #\d+ .*; now waits in "
NO_ANSWER = r"got no answer in #\d+ all_gather of .*: rank 1 \(pid .*\) "
ENDLESS = {
    "waits in a barrier": ("if rank == 1: dist.barrier()", rf"{WAITS}barrier at own\.py:\d+ \(<module>\)\n"),
    "skips a module": (
        "if rank == 1: model[1](model[0](torch.ones(2, 8)))[:, :8].sum().backward()",
        r"got no answer in #\d+ .* for \d+ s: (the ranks have diverged|rank \d .* is (behind|in #))",
    ),
    "saves alone": (
        """
checkpointer = dzero.Checkpointer(dzero.CheckpointConfig(folder="saved", every=1), sharded, optim)
if rank == 1: checkpointer.save(1, {})
""",
        rf"{WAITS}an agreement on saved\n",
    ),
    "gathers a weight": (
        "if rank == 1: model[0].weight.full_tensor()",
        rf"{WAITS}wait_tensor at own\.py:\d+ \(<module>\)\n",
    ),
    "trained in a thread": (
        """
(thread := threading.Thread(target=step)).start()
thread.join()
if rank == 1: dist.barrier()
""",
        rf"{WAITS}barrier at own\.py:\d+ \(<module>\)\n",
    ),
    "keeps the interpreter lock": (
        """
import ctypes
if rank == 1: ctypes.PyDLL(None).sleep(1000)
""",
        r"got no answer in #\d+ .* for \d+ s: rank 1 \(pid .*\) gives no sign of life",
    ),
}
"""What a rank does that leaves the other alone, and what is said of it."""
LEAVES = {
    "is killed": ("if rank == 1: os.kill(os.getpid(), 9)", rf"{NO_ANSWER}gives no sign of life"),
    "raises": ("if rank == 1: raise ValueError('of my own')", rf"{NO_ANSWER}ended with ValueError: of my own"),
    "exits": ("if rank == 1: sys.exit(3)", rf"{NO_ANSWER}has left, without an error"),
}
COMPUTES = "if rank == 1: time.sleep(1000)"
LONG = {
    "comes late, many times": """
for _ in range(22):
    if rank == 1: time.sleep(3)
    dist.all_reduce(torch.ones(1))
""",
    "sends what it pickles for long": """
import copyreg
class Slow: pass
def reduced(slow):
    time.sleep(20)
    return Slow, ()
copyreg.pickle(Slow, reduced)
dist.broadcast_object_list([Slow() if rank == 1 else None], src=1)
""",
    "serves data from a thread": """
feed = dist.new_group()
def serve():
    time.sleep(130)
    dist.send(torch.ones(4), 0, group=feed)
if rank == 1:
    threading.Thread(target=serve).start()
else:
    dist.recv(torch.ones(4), 1, group=feed)
""",
}
"""What takes long, and ends."""


@contextmanager
def own_loop(
    folder: Path, then: str, timeout_s: float = 0
) -> Iterator[tuple[Callable[[], str], list[subprocess.Popen[bytes]]]]:
    """Two ranks of a loop, one of which leaves the other alone; give what both have written, and their processes.

    What is said of an error at the end of a process is the interpreter's, which a warm start has no part in.
    """
    (folder / "own.py").write_text(OWN.replace("THEN", then))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo"}
    with (folder / "log.txt").open("ab") as log:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(folder / "own.py"), str(timeout_s)],
                cwd=folder,
                env=os.environ | group | agent | {"RANK": str(rank)} | (COLD if "raise" in then else {}),
                stdout=log,
                stderr=log,
            )
            for rank in range(2)
        ]
    try:
        yield (folder / "log.txt").read_text, ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def until(found: Callable[[], bool], seconds: float = 150.0) -> None:
    """Wait for something; the limit is for hangs, and far below torch's own timeout of half an hour."""
    until_s = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", ENDLESS)
def test_a_loop_of_ones_own_that_stalls_says_who_waits_where(kind: str, tmp_path: Path) -> None:
    """Within how many seconds: tests/stress/test_cuts.py."""
    then, says = ENDLESS[kind]
    with own_loop(tmp_path, then) as (log, ranks):
        until(lambda: re.search(says, log()) is not None)
        assert all(rank.poll() is None for rank in ranks)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("kind", LEAVES)
def test_a_loop_of_ones_own_names_the_rank_that_left_it(kind: str, tmp_path: Path) -> None:
    then, says = LEAVES[kind]
    with own_loop(tmp_path, then) as (log, ranks):
        until(lambda: ranks[0].poll() is not None)
        assert re.search(says, log()), log()


@pytest.mark.full(STALLS)
@pytest.mark.parametrize("then", [ENDLESS["skips a module"][0], COMPUTES], ids=["skips", "computes"])
def test_a_loop_of_ones_own_that_stalls_ends_by_the_timeout_of_its_group(then: str, tmp_path: Path) -> None:
    with own_loop(tmp_path, then, timeout_s=10) as (log, ranks):
        waiting = ranks[:1] if then == COMPUTES else ranks
        until(lambda: all(rank.poll() is not None for rank in waiting))
        # torch's own barrier may have ended its rank a moment earlier
        assert re.search(r"within the process group's timeout of 10 s|rank 1 \(pid .*\) ended with", log()), log()


@pytest.mark.full(STALLS)
@pytest.mark.parametrize("kind", LONG)
def test_what_takes_long_is_neither_taken_for_a_stall_nor_ended(kind: str, tmp_path: Path) -> None:
    """The ranks that wait are told of what computes for over `BUSY_S`; no rank is ended."""
    with own_loop(tmp_path, LONG[kind]) as (log, ranks):
        until(lambda: all(rank.poll() is not None for rank in ranks), 300)
        assert [rank.returncode for rank in ranks] == [0, 0], log()
        assert log().count("goes on") == 2
        all_wait = kind == "serves data from a thread"  # of the rank that serves, in its main thread
        told_s = [int(seconds) for seconds in re.findall(r"got no answer in .* for (\d+) s:", log())]
        assert all(seconds >= (SLOW_S if all_wait else BUSY_S) for seconds in told_s), log()


@pytest.mark.full(STALLS)
def test_ranks_that_compute_for_long_are_left_alone(tmp_path: Path) -> None:
    """A rank that evaluates or saves while others wait is named after a minute, and nothing ends."""
    with own_loop(tmp_path, COMPUTES) as (log, ranks):
        until(lambda: re.search(r"for \d+ s: rank 1 \(pid .*\) is behind", log()) is not None, 300)
        assert all(int(seconds) >= BUSY_S for seconds in re.findall(r"for (\d+) s:", log())), log()
        assert re.search(r"rank 1: .*; now is in own\.py:\d+ \(<module>\)", log()), log()
        assert all(rank.poll() is None for rank in ranks)
