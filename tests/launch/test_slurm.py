"""The script of the guide to several nodes, submitted to a real Slurm: it is stopped, loses a rank, and goes on."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from processes import new_tag, tagged
from slurm import Cluster, cluster
from small_runs import ROOT, write_text
from train_runs import SMALLEST
from two_nodes import two_nodes

SECONDS = 300.0
STEPS = 1_000_000  # until it is told to end


def script(settings: list[str]) -> str:
    """What the guide says, with one rank per node and a small model."""
    page = (ROOT / "docs" / "guides" / "nodes.md").read_text()
    (found,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", page, re.DOTALL)
    for old, new in (
        ("--ntasks-per-node=8 --gpus-per-node=8 --exclusive", "--ntasks-per-node=1"),
        ("python train.py zero.stage=3 checkpoint.every=100", f"{command(settings)} zero.stage=3 checkpoint.every=10"),
    ):
        assert old in found
        found = found.replace(old, new)
    return found


def command(settings: list[str]) -> str:
    return shlex.join([sys.executable, str(ROOT / "train.py"), *SMALLEST, *settings])


def until(found: Callable[[], object], told: Callable[[], str]) -> None:
    began_s = time.monotonic()
    while not found():
        assert time.monotonic() < began_s + SECONDS, told()
        time.sleep(0.1)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        try:
            made = stack.enter_context(cluster(stack.enter_context(two_nodes()), tmp_path))
        except OSError as error:  # no right to make network namespaces, or no Slurm
            pytest.skip(str(error))
        yield made


@pytest.mark.full(
    "tests/trainer/test_faults.py::test_sigterm_saves_the_step_and_a_resumed_run_has_the_bits_of_one_never_stopped"
)
def test_a_job_is_stopped_and_loses_a_rank_and_goes_on_each_time(slurm: Cluster, tmp_path: Path) -> None:
    data, log, tag = write_text(tmp_path / "words.txt"), tmp_path / "log.txt", new_tag()
    settings = [f"data.path={data}", f"train.steps={STEPS}", f"checkpoint.folder={tmp_path / 'shared'}"]
    (tmp_path / "train.sbatch").write_text(script(settings))
    log.touch()
    env = {"GLOO_SOCKET_IFNAME": "eth0", **tag}
    job = slurm.says("sbatch", "--parsable", f"--output={log}", "train.sbatch", cwd=tmp_path, env=env).strip()

    def told() -> str:
        return log.read_text() + slurm.says("scontrol", "show", "job", job)

    until(lambda: re.search(r"saved .*step_0*20\b", log.read_text()), told)
    slurm.says("scancel", "--signal=TERM", job)
    until(lambda: re.search(r"stopped after step (\d+), which is saved", log.read_text()), told)
    stopped = int(re.findall(r"stopped after step (\d+), which is saved", log.read_text())[0])
    until(lambda: f"after step {stopped}" in resumed(log), told)
    until(lambda: re.search(rf"saved .*step_0*{(stopped // 10 + 1) * 10}\b", log.read_text()), told)
    assert requeued(slurm, job) == 1
    os.kill(ranks(tag)[-1], signal.SIGKILL)
    until(lambda: requeued(slurm, job) == 2, told)
    until(lambda: len(re.findall("resumed from", log.read_text())) == 2, told)
    slurm.says("scancel", job)
    until(lambda: not ranks(tag), told)
    assert re.search(r"gives no sign of life|onnection", log.read_text()), told()


def resumed(log: Path) -> str:
    return "\n".join(line for line in log.read_text().splitlines() if "resumed from" in line)


def requeued(slurm: Cluster, job: str) -> int:
    """How often the job was put back."""
    return int(re.findall(r"Restarts=(\d+)", slurm.says("scontrol", "show", "job", job))[0])


def ranks(tag: dict[str, str]) -> list[int]:
    """Process ids of the ranks on both nodes."""
    return [each.pid for each in tagged(tag) if each.words.startswith(f"{sys.executable}\0{ROOT / 'train.py'}")]


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


@pytest.mark.full(
    "tests/trainer/test_faults.py::test_sigterm_saves_the_step_and_a_resumed_run_has_the_bits_of_one_never_stopped"
)
def test_srun_without_rank_starts_no_run_in_each_task_and_a_script_may_run(slurm: Cluster, tmp_path: Path) -> None:
    """The script has SLURM_NTASKS=2 too, but is one process, and so is what is typed in a shell of srun."""
    data, log = write_text(tmp_path / "words.txt"), tmp_path / "log.txt"
    run = command([f"data.path={data}", "train.steps=1"])
    (tmp_path / "alone.sbatch").write_text(ALONE.format(command=run))
    (tmp_path / "typed.sh").write_text(TYPED.format(command=run))
    log.touch()
    env = {"GLOO_SOCKET_IFNAME": "eth0"}
    slurm.says("sbatch", "--parsable", f"--output={log}", "alone.sbatch", cwd=tmp_path, env=env)
    until(lambda: "the shell's run ended with" in log.read_text(), log.read_text)
    said = log.read_text()
    assert said.count("error: SLURM_STEP_NUM_TASKS=2 without RANK: each of several processes would be a run") == 2
    assert "srun ended with 1\n" in said
    assert "the script's run ended with 0\n" in said
    assert "the shell's run ended with 0\n" in said
    assert len(re.findall(r"^\s*steps +1, ", said, re.MULTILINE)) == 2
