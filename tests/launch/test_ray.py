"""Ray Train starts the ranks, one of which dies: all go on from the latest checkpoint, in a loop and under train.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from processes import new_tag, tagged
from small_runs import ROOT, write_text
from train_runs import SMALLEST

SECONDS = 600.0


ALONE = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$0" "$@"']
"""Runs a command where there is no network but its own loopback, gone with its last process: Ray listens on all."""


@pytest.mark.full("tests/trainer/test_faults.py::test_a_killed_rank_is_named_and_all_are_gone")
@pytest.mark.parametrize("kind", ["own loop", "train.py"])
def test_a_worker_that_dies_is_started_again_and_goes_on(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    tried = subprocess.run([*ALONE, "true"], check=False, capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"network namespaces are not permitted here: {tried.stderr}")
    folder, log, tag = tmp_path / "shared", tmp_path / "log.txt", new_tag()
    settings = [*SMALLEST, f"data.path={write_text(tmp_path / 'words.txt')}", "zero.stage=3", "train.steps=200"]
    words = ["30"] if kind == "own loop" else settings
    victim = "ray::RayTrainWorker" if kind == "own loop" else str(ROOT / "train.py")
    offline = {"RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as output:
        command = [*ALONE, sys.executable, str(ROOT / "examples" / "ray_train.py"), str(folder), *words]
        env = os.environ | offline | tag | {"PYTHONPATH": str(ROOT)}
        run = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=output, stderr=output)
        try:
            until_s = time.monotonic() + SECONDS
            while len(saved := steps(folder)) < 2:
                assert run.poll() is None, log.read_text()
                assert time.monotonic() < until_s, log.read_text()
                time.sleep(0.05)
            os.kill([each.pid for each in tagged(tag) if victim in each.words][-1], signal.SIGKILL)
            assert run.wait(SECONDS) == 0, log.read_text()
        finally:
            for each in tagged(tag):
                with suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGKILL)
            run.wait()
    print(log.read_text()[-3000:])
    assert steps(folder)[-1] == (30 if kind == "own loop" else 200)
    first = re.findall(r"goes on after step (\d+)|resumed from .*, after step (\d+)", log.read_text())
    assert first, log.read_text()
    assert max(int(a or b) for a, b in first) >= saved[0]


def steps(folder: Path) -> list[int]:
    """The steps of the checkpoints that are there."""
    return sorted(int(each.name.removeprefix("step_")) for each in (folder / "checkpoints").glob("step_????????"))
