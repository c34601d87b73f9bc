"""SIGKILL at any moment of a save: the checkpoint before or the new one is there, whole; what was left is tidied up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from warm_python import COLD

HOUSE = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "kill_cases.py"


def killed(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """A run of two ranks that saves again and again, killed `kills` times, each time resumed and killed anew."""
    environment = os.environ | {"PYTHONPATH": f"{HOUSE}:{HOUSE / 'tests' / 'support'}", "OMP_NUM_THREADS": "1", **COLD}
    command = [sys.executable, str(CASES), str(folder), str(kills), str(seed)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    seen: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert seen["wrong"] == []
    assert sum(seen["killed"].values()) == seen["kills"] == kills
    return seen


def test_thirty_killed_runs_resume_from_the_step_before_or_the_new_one_with_its_bits(tmp_path: Path) -> None:
    seen = killed(tmp_path / "shelf", 30, seed=0)
    assert seen["left"]["half a checkpoint"] > 0  # kills did fall into saves
    assert seen["steps"] > 0


@pytest.mark.slow
def test_a_thousand_killed_runs_do_so_at_every_phase_of_a_save(tmp_path: Path) -> None:
    """With what each left behind, for benchmarks/results."""
    seen = killed(tmp_path / "shelf", 1000, seed=1)
    print(json.dumps(seen))
    assert min(seen["left"][what] for what in ("nothing", "half a checkpoint", "half of an old one")) > 0
    assert seen["left"]["all but a name"] > 0
    assert seen["left"]["a checkpoint that is not the latest yet"] > 0
