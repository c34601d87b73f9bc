"""However a run ends, it says why once, and leaves no process and no file behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from processes import listen, new_tag, tagged
from small_runs import ROOT, write_text
from train_runs import SMALLEST
from typed_commands import in_a_process, refused

CASES = Path(__file__).parents[1] / "support" / "launch_cases.py"
SECONDS = 120.0  # what takes longer hangs
TOLD = "tests/launch/test_launch.py::test_a_failure_is_told_once_by_the_rank_that_failed"
TAGS: dict[int, dict[str, str]] = {}


def begin(folder: Path, *cases: str) -> subprocess.Popen[str]:
    """Start the cases in a session of their own; temporary files go to `folder`/tmp."""
    (folder / "tmp").mkdir(parents=True)
    tag = new_tag()
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), **tag}
    process = subprocess.Popen(
        [sys.executable, str(CASES), *cases, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
        preexec_fn=listen,
    )
    TAGS[process.pid] = tag
    return process


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while not true() and time.monotonic() < until_s:
        time.sleep(0.05)
    return true()


def is_gone(process: subprocess.Popen[str]) -> bool:
    """Whether nothing is left of all that it started; multiprocessing's own helper ends last."""
    return tagged(TAGS[process.pid]) == []


def test_a_failure_is_told_once_by_the_rank_that_failed(tmp_path: Path) -> None:
    process = begin(tmp_path, "succeed", "rank_1_raises", "rank_1_is_killed", "all_refuse")
    output, noise = process.communicate(timeout=300)
    ended = {line["case"]: line for line in map(json.loads, output.splitlines())}

    assert ended["succeed"]["error"] is None
    assert [(tmp_path / f"rank{rank}.sum").read_text() for rank in (0, 1)] == ["2.0 1 cpu"] * 2

    raised = ended["rank_1_raises"]["error"]
    assert raised.startswith("rank 1 failed; the other workers were ended\nTraceback")
    assert raised.endswith("ValueError: the cause\n")
    assert raised.count("Traceback") == 1

    killed = ended["rank_1_is_killed"]["error"]
    assert killed.startswith("rank 1 (pid ")
    assert "was killed by SIGKILL" in killed

    assert ended["all_refuse"]["error"] == "mend this"
    assert noise == ""
    assert list((tmp_path / "tmp").iterdir()) == []
    assert wait_until(partial(is_gone, process), SECONDS)


STOPPED = "stopped by SIGINT; the workers were ended\n"
ENDINGS = {
    "Ctrl-C": (signal.SIGINT, True, 128 + signal.SIGINT, STOPPED),
    "interrupt": (signal.SIGINT, False, 128 + signal.SIGINT, STOPPED),
    "terminate": (signal.SIGTERM, False, 128 + signal.SIGTERM, STOPPED.replace("INT", "TERM")),
    "kill": (signal.SIGKILL, False, -signal.SIGKILL, None),
}
"""The signal, whether it goes to the whole group, the exit code, and what is told."""


@pytest.mark.full(TOLD)
def test_a_signal_ends_every_process_and_runs_beside_it_go_on(tmp_path: Path) -> None:
    runs = {name: begin(tmp_path / name, "wait_for_each_other") for name in ENDINGS}  # all at once: no port clashes
    try:
        for name, (number, whole_group, code, told) in ENDINGS.items():
            process, folder = runs[name], tmp_path / name
            assert wait_until(partial(both_ranks_run, folder), SECONDS), name
            (os.killpg if whole_group else os.kill)(process.pid, number)
            output, noise = process.communicate(timeout=SECONDS)
            assert wait_until(partial(is_gone, process), SECONDS), name
            assert (process.returncode, output) == (code, ""), name
            assert list((folder / "tmp").iterdir()) == [], name
            if told is not None:
                assert noise == told, name
                assert len(list(folder.glob("*.unwound"))) == 2, name
    finally:
        for process in runs.values():
            process.kill()


def both_ranks_run(folder: Path) -> bool:
    return len(list(folder.glob("*.pid"))) == 2


LIMITED = """
import errno, os, subprocess

left = int(os.environ["PROCESSES"])


def limited(start):
    def start_one(*args):
        global left
        left -= 1
        if left < 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(*args)

    return start_one


os.fork, subprocess._fork_exec = limited(os.fork), limited(subprocess._fork_exec)
"""


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("processes", [0, 3], ids=["warm", "rank"])
def test_a_system_that_starts_no_more_processes_is_told_in_one_line(tmp_path: Path, processes: int) -> None:
    """As `ulimit -u` does, which binds no root: each process starts so many others, and the next one fails."""
    (tmp_path / "sitecustomize.py").write_text(LIMITED)
    write_text(tmp_path / "words.txt", 2000)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PROCESSES": str(processes)}
    ended = in_a_process("train.py", *SMALLEST, "data.path=words.txt", "launch.workers=1", cwd=tmp_path, env=env)
    told = "the system starts no more processes: Resource temporarily unavailable; lower launch.workers, or raise"
    assert refused(ended, told).count("\n") == 1


def test_a_torch_that_cannot_be_imported_is_told_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so: cannot open shared object file')")
    write_text(tmp_path / "words.txt", 2000)
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ended = in_a_process("train.py", *SMALLEST, "data.path=words.txt", cwd=tmp_path, env=env)
    assert ended.stderr.startswith("error: the run's modules cannot be imported\n")
    assert ended.stderr.endswith("ImportError: libcudart.so: cannot open shared object file\n\n")
    assert (ended.returncode, ended.stdout) == (1, "")


@pytest.mark.full(TOLD)
def test_ctrl_c_while_workers_start_is_as_quiet(tmp_path: Path) -> None:
    process = begin(tmp_path / "early", "wait_for_each_other")
    assert wait_until(lambda: any("fork_server" in each.words for each in tagged(TAGS[process.pid])), SECONDS)
    time.sleep(1.5)
    os.killpg(process.pid, signal.SIGINT)
    output, noise = process.communicate(timeout=SECONDS)
    assert (process.returncode, output, noise) == (130, "", STOPPED)
    assert wait_until(partial(is_gone, process), SECONDS)
