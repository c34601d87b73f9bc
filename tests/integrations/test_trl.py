"""TRL's trainers with `DzeroMixin` before them: the losses of TRL alone, which on two ranks is DDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RUNS = Path(__file__).with_name("trl_runs.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
STEPS = 10
ALONE = "tests/integrations/test_hf_trainer.py::test_a_script_of_trainer_gives_the_same_numbers"


def run(folder: Path, launch: list[str], *cases: str) -> dict[str, Any]:
    script(ROOT / "examples" / "finetune" / "make_model.py", folder / "model")
    script(*launch, RUNS, folder / "model", folder, *cases)
    found: dict[str, Any] = json.loads((folder / "losses.json").read_text())
    return found


def script(*words: str | Path) -> None:
    line = [sys.executable, *map(str, words)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]


def check(found: dict[str, Any], *cases: str) -> None:
    """Compare losses to 1e-6 of them; those of GRPO are small differences of sums, so to 1e-6 of their size."""
    assert found.pop("told").startswith("DzeroTrainer with sync_ref_model of TRL")
    assert found.keys() == {*cases} or not cases
    for case, losses in found.items():
        assert len({*losses["alone"]}) == STEPS, f"{case}: each step changes the model"
        close = {"abs": 1e-6} if case == "grpo" else {"rel": 1e-6}
        assert losses["dzero"] == pytest.approx(losses["alone"], **close), case


@pytest.mark.full(ALONE)
def test_sft_and_dpo_take_ten_steps_with_the_losses_of_trl_alone(tmp_path: Path) -> None:
    check(run(tmp_path, [], "sft", "dpo"), "sft", "dpo")


@pytest.mark.full(ALONE)
def test_every_trainer_on_two_ranks_has_the_losses_of_trl_with_ddp(tmp_path: Path) -> None:
    found = run(tmp_path, TORCHRUN)
    assert len(found) == 12
    check(found)
