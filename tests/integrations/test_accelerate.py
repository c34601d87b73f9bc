"""What of accelerate works with a model that dzero shards, and what is refused in one line.

The loops run in processes of their own, because an `Accelerator` keeps its state in singletons.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
from launched import accelerate, launched, torchrun

ALIKE = (
    "tests/integrations/test_accelerate.py::test_a_loop_of_accelerate_trains_saves_and_is_refused_what_would_go_wrong"
)


def run(folder: Path, launch: list[str], settings: list[dict[str, Any]], *more: str) -> dict[str, Any]:
    found: dict[str, Any] = launched("accelerate_runs.py", folder, json.dumps(settings), *more, by=launch)
    return found


def check_what_else_was_tried(found: dict[str, Any]) -> None:
    assert found["resumes"]
    assert found["resumes with a prepared model"]
    assert found["saves a prepared optimizer"].startswith("accelerator.prepare(optim): accelerate would save the first")
    assert "none was the last" in found["steps on each microbatch"]
    assert "no states of dzero" in found["no states"]


def check_training(found: dict[str, Any]) -> None:
    """Losses, norms and rates of accelerate's DDP to 1e-6, weights to 1e-5; padded samples are counted once."""
    plain = found["plain"]
    assert len({loss for loss, *_ in plain["logs"]}) == len(plain["logs"]), "each step changes the model"
    for each in found["dzero"]:
        assert each["seen"] == plain["seen"] == 88
        for mine, theirs in zip(each["logs"], plain["logs"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        assert each["weights"] == pytest.approx(plain["weights"], abs=1e-5)


def test_a_loop_of_accelerate_trains_saves_and_is_refused_what_would_go_wrong(tmp_path: Path) -> None:
    found = run(tmp_path, torchrun(2), [{"stage": 3}], "all")
    check_training(found)
    assert found["autocast"] == "torch.float32"
    check_what_else_was_tried(found)


@pytest.mark.full(ALIKE)
def test_every_stage_and_tier_trains_as_accelerate_alone(tmp_path: Path) -> None:
    tiers = [{"stage": 1, "offload": "host"}, {"stage": 3, "offload": "infinity"}, {"stage": 3, "offload": "host_all"}]
    check_training(run(tmp_path, torchrun(2), [*({"stage": stage} for stage in range(3)), *tiers]))


@pytest.mark.full(ALIKE)
def test_accelerate_launch_starts_the_same_loop(tmp_path: Path) -> None:
    """With bf16, which a plain model gets as autocast and one of dzero as its own dtypes."""
    found = run(tmp_path, accelerate("bf16"), [{"stage": 2}, {"stage": 3}], "all")
    assert found["dzero"][0]["logs"] == found["dzero"][1]["logs"]
    assert found["autocast"] == "torch.bfloat16"
    check_what_else_was_tried(found)
