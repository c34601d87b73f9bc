"""TRL's trainers with `DzeroMixin` before them: the losses of TRL alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STEPS = 10


def run(*words: str | Path) -> None:
    line = [sys.executable, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.full
def test_sft_and_dpo_take_ten_steps_with_the_losses_of_trl_alone(tmp_path: Path) -> None:
    run(ROOT / "examples" / "finetune" / "make_model.py", tmp_path / "model")
    run(Path(__file__).with_name("trl_runs.py"), tmp_path / "model", tmp_path)
    found = json.loads((tmp_path / "losses.json").read_text())
    for kind in ("sft", "dpo"):
        assert len(found[kind]) == STEPS
        assert len({*found[kind]}) == STEPS, "each step changes the model"
        assert found[f"dzero {kind}"] == pytest.approx(found[kind], rel=1e-6)
