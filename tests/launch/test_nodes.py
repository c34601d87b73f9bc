"""Two machines, as two network namespaces with a cable between them: what the guide to several nodes says, run under
torchrun and by a real Slurm."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from processes import new_tag, tagged
from slurm import Cluster, cluster
from small_runs import ROOT, write_text
from train_runs import SMALLEST, TORCHRUN, Run, running
from two_nodes import NODES, two_nodes

SECONDS = 300.0  # what takes longer hangs
STEPS = 1_000_000  # until it is told to end
GUIDE = ROOT / "docs" / "guides" / "nodes.md"
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
SETTINGS = ["zero.stage=3", "checkpoint.every=10", "resume=auto"]
BITS = "tests/trainer/test_faults.py::test_a_stopped_run_resumes_to_the_bit"


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """The names of two namespaces."""
    with ExitStack() as stack:
        try:
            names = stack.enter_context(two_nodes())
        except OSError as error:  # no right to make network namespaces
            pytest.skip(str(error))
        yield names


@pytest.fixture
def slurm(nodes: tuple[str, str], tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(cluster(nodes, tmp_path))
        except OSError as error:  # no Slurm
            pytest.skip(str(error))
        yield made


def until(found: Callable[[], object], told: Callable[[], str]) -> None:
    began_s = time.monotonic()
    while not found():
        assert time.monotonic() < began_s + SECONDS, told()
        time.sleep(0.1)


# torchrun


def under_torchrun(address: str, *, first: bool, ranks: int) -> list[str]:
    """The words of one node; all but the last two are the same on every node."""
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-id=my_run", f"--rdzv-endpoint={NODES[0]}:29500"]
    here = [f"--rdzv-conf=is_host={int(first)}", f"--local-addr={address}"]
    return ["--nnodes=2", f"--nproc-per-node={ranks}", "--max-restarts=3", *rendezvous, *here]


def test_the_guide_shows_the_commands_that_are_run_here() -> None:
    said = GUIDE.read_text().replace(" \\\n", " ").split()
    assert OWN_STORE in said
    for first in (True, False):
        for word in under_torchrun(NODES[1 - first], first=first, ranks=8) + SETTINGS:
            assert said.count(word) >= 1, word


@pytest.mark.full("tests/launch/test_nodes.py::test_the_guide_shows_the_commands_that_are_run_here")
def test_a_node_that_is_killed_comes_back_and_both_go_on(nodes: tuple[str, str], tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.txt")
    settings = [*SETTINGS, "train.steps=60", f"checkpoint.folder={tmp_path / 'shared'}"]

    def node(index: int, life: int = 0) -> AbstractContextManager[Run]:
        launcher = [*TORCHRUN, *under_torchrun(NODES[index], first=index == 0, ranks=1)]
        prefix = f"ip netns exec {nodes[index]} env GLOO_SOCKET_IFNAME=eth0 {OWN_STORE}"
        return running(tmp_path / f"node{index}_{life}", text, *settings, launcher=launcher, prefix=prefix)

    def one_tells(pattern: str, *runs: Run) -> None:
        """Wait for the run whose rank 0 tells it first."""
        until(lambda: any(re.search(pattern, run.log) for run in runs), lambda: "\n".join(run.log for run in runs))

    with node(0) as first, node(1) as second:
        one_tells(r"saved .*/step_00000020", first, second)
        for pid in [*second.workers(), second.process.pid]:
            os.kill(pid, signal.SIGKILL)
        with node(1, life=1) as again:
            one_tells(r"resumed from .*, after step [2345]0", first, again)
            assert (first.end(), again.end()) == (0, 0), first.log + again.log
    assert len([run for run in (first, again) if re.search(r"saved .*/step_00000060", run.log)]) == 1


# Slurm


def script(run: str) -> str:
    """What the guide says, with one rank per node and a small run."""
    (found,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", GUIDE.read_text(), re.DOTALL)
    for old, new in (
        ("--ntasks-per-node=8 --gpus-per-node=8 --exclusive", "--ntasks-per-node=1"),
        ("python train.py zero.stage=3 checkpoint.every=100", f"{run} zero.stage=3 checkpoint.every=10"),
    ):
        assert old in found
        found = found.replace(old, new)
    return found


def command(*settings: str) -> str:
    return shlex.join([sys.executable, str(ROOT / "train.py"), *SMALLEST, *settings])


@pytest.mark.full(BITS)
def test_a_job_is_stopped_and_loses_a_rank_and_goes_on_each_time(slurm: Cluster, tmp_path: Path) -> None:
    data, log, tag = write_text(tmp_path / "words.txt"), tmp_path / "log.txt", new_tag()
    run = command(f"data.path={data}", f"train.steps={STEPS}", f"checkpoint.folder={tmp_path / 'shared'}")
    (tmp_path / "train.sbatch").write_text(script(run))
    log.touch()
    env = {"GLOO_SOCKET_IFNAME": "eth0", **tag}
    job = slurm.says("sbatch", "--parsable", f"--output={log}", "train.sbatch", cwd=tmp_path, env=env).strip()

    def told() -> str:
        return log.read_text() + slurm.says("scontrol", "show", "job", job)

    def says(pattern: str) -> list[str]:
        until(lambda: re.search(pattern, log.read_text()), told)
        return re.findall(pattern, log.read_text())

    def restarts() -> int:
        return int(re.findall(r"Restarts=(\d+)", slurm.says("scontrol", "show", "job", job))[0])

    def ranks() -> list[int]:
        """Process ids on both nodes."""
        return [each.pid for each in tagged(tag) if each.words.startswith(f"{sys.executable}\0{ROOT / 'train.py'}")]

    says(r"saved .*step_0*20\b")
    slurm.says("scancel", "--signal=TERM", job)
    stopped = int(says(r"stopped after step (\d+), which is saved")[0])
    says(rf"resumed from .*after step {stopped}\b")
    says(rf"saved .*step_0*{(stopped // 10 + 1) * 10}\b")
    assert restarts() == 1
    os.kill(ranks()[-1], signal.SIGKILL)
    until(lambda: restarts() == 2, told)
    says(r"resumed from (.|\n)*resumed from ")
    slurm.says("scancel", job)
    until(lambda: not ranks(), told)
    assert re.search(r"gives no sign of life|onnection", log.read_text()), told()


ALONE = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1
srun {command}
echo "srun ended with $?"
{command} launch.workers=1
echo "the script's run ended with $?"
script -qec "srun --pty bash typed.sh" /dev/null
echo "the shell's run ended with $?"
"""
TYPED = """[ "$SLURM_PROCID" != 0 ] || exec {command} launch.workers=1
"""


@pytest.mark.full(BITS)
def test_srun_without_rank_starts_no_run_in_each_task_and_a_script_may_run(slurm: Cluster, tmp_path: Path) -> None:
    """The script has SLURM_NTASKS=2 too, but is one process, and so is what is typed in a shell of srun."""
    log, run = tmp_path / "log.txt", command(f"data.path={write_text(tmp_path / 'words.txt')}", "train.steps=1")
    (tmp_path / "alone.sbatch").write_text(ALONE.format(command=run))
    (tmp_path / "typed.sh").write_text(TYPED.format(command=run))
    log.touch()
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    slurm.says("sbatch", "--parsable", f"--output={log}", "alone.sbatch", cwd=tmp_path, env=env)
    until(lambda: "the shell's run ended with" in log.read_text(), log.read_text)
    said = log.read_text()
    assert said.count("error: SLURM_STEP_NUM_TASKS=2 without RANK: each of several processes would be a run") == 2
    for ended in ("srun ended with 1\n", "the script's run ended with 0\n", "the shell's run ended with 0\n"):
        assert ended in said
    assert len(re.findall(r"^\s*steps +1, ", said, re.MULTILINE)) == 2
