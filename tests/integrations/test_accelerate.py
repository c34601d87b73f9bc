"""What of accelerate works with a model that dzero shards, and what is refused in one line.

The loops run in processes of their own, because an `Accelerator` keeps its state in singletons.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typed_commands import typed

pytest.importorskip("accelerate")

RUNS = Path(__file__).with_name("accelerate_runs.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python", sys.executable]
"""Without its own `python -u`, so that the ranks start warm."""
LAUNCH = [
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"),
    *("--main_process_port=0", "--mixed_precision=bf16", "--dynamo_backend=no"),
]
"""With bf16, which a plain model gets as autocast and one of dzero as its own dtypes. `--cpu` starts one process."""


def run(folder: Path, launch: list[str], settings: list[dict[str, Any]]) -> dict[str, Any]:
    done = typed(*launch, RUNS, folder, json.dumps(settings), cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return found


def check_refusals(found: dict[str, Any]) -> None:
    assert found["saves a prepared optimizer"].startswith("accelerator.prepare(optim): accelerate would save the first")
    assert "none was the last" in found["steps on each microbatch"]
    first, second = found["first rank's file"]
    assert first == ""
    assert "a shard of the rank at [0] along the sharded axes, where this rank is at [1]" in second
    assert "no states of dzero" in found["no states"]


def check_training(found: dict[str, Any], runs: list[dict[str, Any]]) -> None:
    """Losses, norms and rates of accelerate's DDP to 1e-6, weights to 1e-5; padded samples are counted once."""
    plain = found["plain"]
    assert len({loss for loss, *_ in plain["logs"]}) == len(plain["logs"]), "each step changes the model"
    for each in runs:
        assert each["seen"] == plain["seen"] == 88
        for mine, theirs in zip(each["logs"], plain["logs"], strict=True):
            assert mine == pytest.approx(theirs, rel=1e-6)
        assert each["weights"] == pytest.approx(plain["weights"], abs=1e-5)


def test_a_loop_of_accelerate_trains_saves_and_is_refused_what_would_go_wrong(tmp_path: Path) -> None:
    found = run(tmp_path, TORCHRUN, [{"stage": 3}])
    check_training(found, found["dzero"])
    assert found["resumes"]
    assert found["resumes with a prepared model"]
    assert found["autocast"] == "torch.float32"
    check_refusals(found)


@pytest.mark.full(
    "tests/integrations/test_accelerate.py::test_a_loop_of_accelerate_trains_saves_and_is_refused_what_would_go_wrong"
)
def test_every_stage_and_tier_trains_as_accelerate_alone(tmp_path: Path) -> None:
    tiers = [{"stage": 1, "offload": "host"}, {"stage": 3, "offload": "infinity"}, {"stage": 3, "offload": "host_all"}]
    found = run(tmp_path, TORCHRUN, [*({"stage": stage} for stage in range(4)), *tiers])
    check_training(found, found["dzero"])


@pytest.mark.full(
    "tests/integrations/test_accelerate.py::test_a_loop_of_accelerate_trains_saves_and_is_refused_what_would_go_wrong"
)
def test_accelerate_launch_starts_the_same_loop(tmp_path: Path) -> None:
    found = run(tmp_path, LAUNCH, [{"stage": 2}, {"stage": 3}])
    assert found["dzero"][0]["logs"] == found["dzero"][1]["logs"]
    assert found["resumes"]
    assert found["autocast"] == "torch.bfloat16"
    check_refusals(found)
