"""Ranks on two nodes that are cut off each other, and how long any of them lives on.

    two network namespaces with a wire between them      a process that hosts the store of the ranks, on the first node
    half of the ranks on either                          `train.py`, a loop of one's own, or `DzeroTrainer`

    kind of cut         what happens
    link down           The interface of the second node goes down in mid-step.
    packets dropped     Every packet is lost, which nothing tells either side.
    store stopped       The host of the store is stopped, and a rank of the first node with it.
    node gone           The interface goes down, and the store and the ranks of the first node are killed.

Every rank that is left must end within the timeout and `GRACE_S`, whatever the store does.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from small_runs import ROOT, SMALL, write_text
from two_nodes import NODES, WIRES, ip, two_nodes

CUTS = ("link down", "packets dropped", "store stopped", "node gone")
PROGRAMS = ("train.py", "own loop", "DzeroTrainer")
TIMEOUT_S, GRACE_S, HANGS_S = 8.0, 5.0, 120.0
PORT = 29500
HERE = Path(__file__).parent


class Rank(NamedTuple):
    """A running rank, its node, and where its output goes."""

    process: subprocess.Popen[bytes]
    node: int
    log: Path

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def steps(self) -> int:
        return max(map(int, re.findall(r"step=(\d+)\s", self.log.read_text())), default=0)


def command(program: str, data: Path, timeout_s: float) -> list[str]:
    """The words of a rank of a program that trains for ever, and says `step=N`."""
    if program == "train.py":
        settings = [*SMALL.split(), "train.steps=1000000", "monitor.tensorboard=false", "monitor.log_every_steps=1"]
        settings += [f"launch.timeout_s={timeout_s:g}", f"data.path={data}", "zero.stage=3", "launch.threads=1"]
        return [sys.executable, str(ROOT / "train.py"), *settings]
    kind = "loop" if program == "own loop" else "trainer"
    return [sys.executable, str(HERE / "cut_programs.py"), kind, f"{timeout_s:g}"]


@contextmanager
def running(
    nodes: tuple[str, str], program: str, ranks: int, folder: Path, timeout_s: float, wire: str = WIRES[0]
) -> Iterator[tuple[list[Rank], subprocess.Popen[bytes]]]:
    """The ranks of a run after some steps, whose collectives use `wire`, and the process that hosts their store."""
    folder.mkdir(parents=True)
    data = write_text(folder / "words.txt")
    host = [sys.executable, str(HERE / "cut_programs.py"), "store", NODES[0], str(PORT)]
    store, started = subprocess.Popen(["ip", "netns", "exec", nodes[0], *host]), list[Rank]()
    try:
        for rank in range(ranks):
            node, log = rank * 2 // ranks, folder / f"rank{rank}.txt"
            local = {"LOCAL_RANK": rank % (ranks // 2), "LOCAL_WORLD_SIZE": ranks // 2, "OMP_NUM_THREADS": 1}
            group = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": NODES[0], "MASTER_PORT": PORT}
            agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "GLOO_SOCKET_IFNAME": wire}
            (home := folder / str(rank)).mkdir()
            with log.open("wb") as output:
                line = ["ip", "netns", "exec", nodes[node], *command(program, data, timeout_s)]
                env = os.environ | {key: str(value) for key, value in (local | group | agent).items()}
                process = subprocess.Popen(line, env=env, cwd=home, stdout=output, stderr=output)
            started.append(Rank(process, node, log))
        until_s = time.monotonic() + HANGS_S
        while started[0].steps() < 5:
            if time.monotonic() > until_s or any(map(Rank.has_ended, started)):
                raise RuntimeError("\n".join(rank.log.read_text() for rank in started))
            time.sleep(0.05)
        yield started, store
    finally:
        for process in (*(rank.process for rank in started), store):
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def cut(kind: str, nodes: tuple[str, str], ranks: list[Rank], store: subprocess.Popen[bytes]) -> list[Rank]:
    """Cut the nodes off each other; return the ranks that must end by themselves."""
    first = [rank for rank in ranks if rank.node == 0]
    if kind == "packets dropped":
        for node, other in zip(nodes, NODES[::-1], strict=True):  # to an interface that nobody has
            ip("-n", node, "neigh", "replace", other, "lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent")
    elif kind == "store stopped":
        for process in (store, first[-1].process):
            process.send_signal(signal.SIGSTOP)
        return [rank for rank in ranks if rank is not first[-1]]
    else:
        ip("-n", nodes[1], "link", "set", "eth0", "down")
    if kind == "node gone":
        for process in (store, *(rank.process for rank in first)):
            process.kill()
        return [rank for rank in ranks if rank.node == 1]
    return ranks


def lived_s(ranks: list[Rank], timeout_s: float) -> list[float]:
    """Seconds after which each rank ended, from now on; of one that lives too long, how long it was waited for."""
    began_s, ended = time.monotonic(), dict[int, float]()
    while len(ended) < len(ranks) and time.monotonic() < began_s + timeout_s + HANGS_S:
        for index, rank in enumerate(ranks):
            if index not in ended and rank.has_ended():
                ended[index] = time.monotonic() - began_s
        time.sleep(0.02)
    return [ended.get(index, time.monotonic() - began_s) for index in range(len(ranks))]


def measure(kind: str, program: str, ranks: int, folder: Path, timeout_s: float = TIMEOUT_S) -> tuple[float, list[str]]:
    """One cut in mid-step: the longest that any rank lived on, and what each of those that were left said."""
    with two_nodes() as nodes, running(nodes, program, ranks, folder, timeout_s) as (started, store):
        time.sleep(random.uniform(1.0, 2.0))
        left = cut(kind, nodes, started, store)
        longest_s = max(lived_s(left, timeout_s))
        return longest_s, [rank.log.read_text() for rank in left]
