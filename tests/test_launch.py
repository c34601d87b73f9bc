"""However a run ends, it ends within seconds, says why once, and leaves no process and no file behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CASES = Path(__file__).parent / "launch_cases.py"
SECONDS = 25.0  # of a crowded machine; an idle one takes one


def begin(folder: Path, *cases: str) -> subprocess.Popen[str]:
    """Start the cases in a session of their own; temporary files go to `folder`/tmp."""
    (folder / "tmp").mkdir(parents=True)
    env = {**os.environ, "TMPDIR": str(folder / "tmp")}
    return subprocess.Popen(
        [sys.executable, str(CASES), *cases, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    )


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    until_s = time.monotonic() + seconds
    while not true() and time.monotonic() < until_s:
        time.sleep(0.05)
    return true()


def session(process: subprocess.Popen[str]) -> list[str]:
    """The command lines of what is left of a session, zombies (which nobody reaps in a container) left out."""
    left = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, leader = stat.read_text().rpartition(")")[2].split()[:4]
            if int(leader) == process.pid and state != "Z":
                left.append((stat.parent / "cmdline").read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return left


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
    assert wait_until(lambda: session(process) == [], SECONDS)  # multiprocessing's own helper ends last


ENDINGS = {
    "Ctrl-C": (signal.SIGINT, True, 128 + signal.SIGINT, "stopped by SIGINT; the workers were ended\n"),
    "interrupt": (signal.SIGINT, False, 128 + signal.SIGINT, "stopped by SIGINT; the workers were ended\n"),
    "terminate": (signal.SIGTERM, False, 128 + signal.SIGTERM, "stopped by SIGTERM; the workers were ended\n"),
    "kill": (signal.SIGKILL, False, -signal.SIGKILL, None),
}


@pytest.mark.parametrize(
    "names", [("Ctrl-C", "terminate", "kill"), pytest.param(tuple(ENDINGS), marks=pytest.mark.slow)], ids=len
)
def test_a_signal_ends_every_process_and_runs_beside_it_go_on(tmp_path: Path, names: tuple[str, ...]) -> None:
    runs = {name: begin(tmp_path / name, "wait_for_each_other") for name in names}  # all at once: no port clashes
    try:
        for name in names:
            (number, whole_group, code, told), process, folder = ENDINGS[name], runs[name], tmp_path / name
            assert wait_until(lambda folder=folder: len(list(folder.glob("*.pid"))) == 2, 120), name  # type: ignore[misc]
            (os.killpg if whole_group else os.kill)(process.pid, number)
            output, noise = process.communicate(timeout=SECONDS)
            assert wait_until(lambda process=process: session(process) == [], SECONDS), name  # type: ignore[misc]
            assert process.returncode == code, name
            assert output == "", name
            if told is not None:
                assert noise == told, name
                assert len(list(folder.glob("*.unwound"))) == 2, name
                assert list((folder / "tmp").iterdir()) == [], name
    finally:
        for process in runs.values():
            process.kill()


@pytest.mark.parametrize("early_s", [1.5])
def test_ctrl_c_while_workers_start_is_as_quiet(tmp_path: Path, early_s: float) -> None:
    process = begin(tmp_path / "early", "wait_for_each_other")
    assert wait_until(lambda: any("spawn_main" in line for line in session(process)), 120)
    time.sleep(early_s)
    os.killpg(process.pid, signal.SIGINT)
    output, noise = process.communicate(timeout=SECONDS)
    assert (process.returncode, output, noise) == (130, "", "stopped by SIGINT; the workers were ended\n")
    assert wait_until(lambda: session(process) == [], SECONDS)  # multiprocessing's own helper ends last
