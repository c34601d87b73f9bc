"""Two machines, as two network namespaces with a cable between them: what the guide says of several nodes, run."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from small_runs import ROOT, write_text
from train_runs import TORCHRUN, Run, running
from two_nodes import NODES, two_nodes


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces."""
    with ExitStack() as stack:
        try:
            names = stack.enter_context(two_nodes())
        except OSError as error:
            pytest.skip(str(error))
        yield names


def command(address: str, *, first: bool, ranks: int) -> list[str]:
    """torchrun on one node; all but the last two words are the same on every node."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-id=my_run", f"--rdzv-endpoint={NODES[0]}:29500"]
    here = [f"--rdzv-conf=is_host={int(first)}", f"--local-addr={address}"]
    return ["--nnodes=2", f"--nproc-per-node={ranks}", "--max-restarts=3", *rendezvous, *here]


OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
SETTINGS = ["zero.stage=3", "checkpoint.every=10", "resume=auto"]


def test_the_guide_shows_the_commands_that_are_run_here() -> None:
    said = (ROOT / "docs" / "guides" / "nodes.md").read_text().replace(" \\\n", " ").split()
    assert OWN_STORE in said
    for first in (True, False):
        for word in command(NODES[1 - first], first=first, ranks=8) + SETTINGS:
            assert said.count(word) >= 1, word


@pytest.mark.full("tests/launch/test_nodes.py::test_the_guide_shows_the_commands_that_are_run_here")
def test_a_node_that_is_killed_comes_back_and_both_go_on(nodes: tuple[str, str], tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.txt")
    settings = [*SETTINGS, "train.steps=60", f"checkpoint.folder={tmp_path / 'shared'}"]

    def node(index: int, life: int = 0) -> AbstractContextManager[Run]:
        launcher = [*TORCHRUN, *command(NODES[index], first=index == 0, ranks=1)]
        prefix = f"ip netns exec {nodes[index]} env GLOO_SOCKET_IFNAME=eth0 {OWN_STORE}"
        return running(tmp_path / f"node{index}_{life}", text, *settings, launcher=launcher, prefix=prefix)

    with node(0) as first, node(1) as second:
        wait_for_one([first, second], r"saved .*/step_00000020")
        for pid in [*second.workers(), second.process.pid]:
            os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        with node(1, life=1) as again:
            wait_for_one([first, again], r"resumed from .*, after step [2345]0")
            print(f"goes on {time.monotonic() - killed_s:.1f} s after a node was killed")
            assert (first.end(), again.end()) == (0, 0), first.log + again.log
    assert len([run for run in (first, again) if re.search(r"saved .*/step_00000060", run.log)]) == 1


def wait_for_one(runs: list[Run], pattern: str) -> Run:
    """The run whose rank 0 tells it first."""
    until_s = time.monotonic() + 240
    while time.monotonic() < until_s:
        for run in runs:
            if re.search(pattern, run.log):
                return run
        time.sleep(0.05)
    raise AssertionError("\n".join(run.log for run in runs))
