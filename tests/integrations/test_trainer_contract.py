"""What users do with a Trainer gives the same with `DzeroTrainer`; the habits are in contract_runs.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import contract_runs

SOME = (
    "accumulates_an_uneven_epoch",
    "passes_an_optimizer",
    "trains_a_module_of_ones_own",
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable]
"""Without its own `python -u`, so that the ranks start warm."""
ACCELERATE = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--main_process_port=0", "--mixed_precision=no", "--dynamo_backend=no"),
]


def alike(found: Any, want: Any, where: str) -> None:
    """Check answers to 1e-6, and sums of weights to 1e-5: Adam turns rounding into steps where a gradient is zero."""
    zero = 1e-5 if ".weights." in where else 1e-12
    if isinstance(want, dict):
        assert found.keys() == want.keys(), where
        for key in want:
            alike(found[key], want[key], f"{where}.{key}")
    elif isinstance(want, list):
        assert len(found) == len(want), where
        for number, each in enumerate(want):
            alike(found[number], each, f"{where}[{number}]")
    else:
        assert found == (pytest.approx(want, rel=1e-6, abs=zero) if isinstance(want, float) else want), where


def check(folder: Path, launch: list[str], settings: dict[str, Any], *names: str) -> None:
    line = [sys.executable, *launch, contract_runs.__file__, str(folder), json.dumps(settings), *names]
    done = subprocess.run(line, capture_output=True, text=True, timeout=900, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, (done.stdout[-300:], done.stderr[-4000:])
    results = json.loads((folder / "results.json").read_text())
    assert results["ranks"] == (2 if launch else 1)
    found = results["habits"]
    assert found.keys() == {*(names or contract_runs.HABITS)}
    for name, sides in found.items():
        alike(sides["dzero"], sides["plain"], name)


@pytest.mark.full("tests/integrations/test_hf_trainer.py::test_a_script_of_trainer_gives_the_same_numbers")
def test_habits_found_wrong_once_give_what_trainer_gives_on_two_ranks(tmp_path: Path) -> None:
    check(tmp_path, TORCHRUN, {"stage": 3}, *SOME)


@pytest.mark.full("tests/integrations/test_hf_trainer.py::test_a_script_of_trainer_gives_the_same_numbers")
@pytest.mark.parametrize(
    ("launch", "settings"),
    [
        (TORCHRUN, {"stage": 3}),
        (TORCHRUN, {"stage": 1, "offload": "host"}),
        (TORCHRUN, {"stage": 2, "replicate": 2}),
        (ACCELERATE, {"stage": 3}),
        ([], {"stage": 2}),
    ],
    ids=["stage 3", "host", "replicate", "accelerate launch", "one process"],
)
def test_all_habits_give_what_trainer_gives(tmp_path: Path, launch: list[str], settings: dict[str, Any]) -> None:
    check(tmp_path, launch, settings)
