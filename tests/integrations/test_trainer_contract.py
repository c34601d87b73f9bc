"""What users do with a Trainer gives the same with `DzeroTrainer`; the habits are in contract_runs.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import contract_runs
from launched import accelerate, launched, torchrun

TWO = torchrun(2)


def check_alike(found: Any, want: Any, where: str) -> None:
    """Answers to 1e-6, and sums of weights to 1e-5: Adam turns rounding into steps where a gradient is zero."""
    zero = 1e-5 if ".weights." in where else 1e-12
    if isinstance(want, dict):
        assert found.keys() == want.keys(), where
        for key in want:
            check_alike(found[key], want[key], f"{where}.{key}")
    elif isinstance(want, list):
        assert len(found) == len(want), where
        for number, each in enumerate(want):
            check_alike(found[number], each, f"{where}[{number}]")
    else:
        assert found == (pytest.approx(want, rel=1e-6, abs=zero) if isinstance(want, float) else want), where


@pytest.mark.full("tests/integrations/test_hf_trainer.py::test_a_script_of_trainer_gives_the_same_numbers")
@pytest.mark.parametrize(
    ("launch", "settings"),
    [
        (TWO, {"stage": 3}),
        (TWO, {"stage": 1, "offload": "host"}),
        (TWO, {"stage": 2, "replicate": 2}),
        (accelerate("no"), {"stage": 3}),
        ([], {"stage": 2}),
    ],
    ids=["stage 3", "host", "replicate", "accelerate launch", "one process"],
)
def test_all_habits_give_what_trainer_gives(tmp_path: Path, launch: list[str], settings: dict[str, Any]) -> None:
    results = launched("contract_runs.py", tmp_path, json.dumps(settings), by=launch)
    assert results["ranks"] == (2 if launch else 1)
    assert results["habits"].keys() == contract_runs.HABITS.keys()
    for name, sides in results["habits"].items():
        check_alike(sides["dzero"], sides["plain"], name)
