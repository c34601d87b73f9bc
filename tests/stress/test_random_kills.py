"""SIGKILL at random moments of real training runs: no checkpoint that was reported as saved is ever lost.

DZERO_KILLS=300 DZERO_REAL_KILLS=12 pytest -m slow tests/stress/test_random_kills.py
                                                writes benchmarks/results/checkpoint_random_kills.json
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rows import WAYS, count, words, write_row
from small_runs import ROOT, write_text
from train_runs import running

HERE = Path(__file__).parent
SEED = 0


@pytest.mark.slow
def test_no_kill_of_a_rank_loses_a_checkpoint_that_was_reported_as_saved(tmp_path: Path) -> None:
    """Ranks that are forked where torch is imported, so that hundreds of kills take minutes."""
    kills = count("KILLS")
    path = ":".join(map(str, [ROOT, ROOT / "tests" / "support", ROOT / "tests" / "checkpoint", HERE]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(HERE / "kill_runs.py"), str(tmp_path / "runs"), str(kills), str(SEED)]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert run.returncode == 0
    row = json.loads(run.stdout.splitlines()[-1])
    question = "Does a training run that is killed at any moment lose a checkpoint that it had reported as saved?"
    asked = f"DZERO_KILLS={kills} pytest -m slow tests/stress/test_random_kills.py"
    write_row("checkpoint_random_kills", {"question": question, "command": asked, **row})
    assert row["lost_checkpoints"] == 0
    assert row["wrong"] == []


@pytest.mark.slow
def test_no_kill_of_a_real_start_does(tmp_path: Path) -> None:
    """`python train.py` itself, of which the launcher, rank 0 or rank 1 is killed."""
    text, draw, saved = write_text(tmp_path / "words.txt"), random.Random(SEED), 0
    way = words("stage 3, host, overlap backward", tmp_path)
    assert "stage 3, host, overlap backward" in WAYS
    saving = [*way, "train.steps=100000", "checkpoint.every=1", "checkpoint.keep=2", "resume=auto", "launch.threads=1"]
    for number in range(count("REAL_KILLS", 12)):
        with running(tmp_path / str(number), text, *saving, f"checkpoint.folder={tmp_path}/checkpoints") as run:
            run.until(r"^step=\d+ saved ")
            time.sleep(draw.uniform(0, 2))
            victim = draw.choice([run.process.pid, *run.workers()])
            os.kill(victim, signal.SIGKILL)
            run.end()
            log = run.log
        resumed = re.search(r"resumed from .*, after step (\d+)", log)
        assert (int(resumed[1]) if resumed else 0) >= saved, log
        assert "PASSED OVER" not in log
        saved = max(int(step) for step in re.findall(r"saved .*/step_(\d+)", log))
