"""`DzeroTrainer(deepspeed=...)`: the losses of transformers with DeepSpeed itself, and its refusals.

deepspeed_losses.json was printed by trainer_runs.py beside DeepSpeed 0.19.8, one process on the CPU.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from launched import launched, torchrun
from trainer_runs import STEPS

RUNS: dict[str, Any] = json.loads((Path(__file__).parent / "deepspeed_losses.json").read_text())["runs"]
ARGS = {"learning_rate": 1e-2}
OVERFLOWS: dict[str, Any] = {
    "args": {**ARGS, "fp16": True},
    "deepspeed": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}},
}
REFUSED = [
    ({"deepspeed": {"gradient_clipping": 0.5}}, "gradient_clipping=0.5 but max_grad_norm=1.0"),
    ({"deepspeed": {"train_batch_size": 4}}, "train_batch_size=4 but train_batch_size (calculated)=8"),
    ({"deepspeed": {"bf16": {"enabled": True}}}, "bf16.enabled=true but bf16=false"),
    (
        {"deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}},
        "optimizer.params.lr=0.001 but learning_rate=0.01",
    ),
    ({"deepspeed": {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}}, "mics_shard_size=8: a mesh of replicas"),
    ({"deepspeed": {"zero_optimisation": {"stage": 3}}}, "did you mean zero_optimization?"),
    ({"deepspeed": "missing.json"}, "missing.json: no such file"),
    (
        {"deepspeed": {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}}},
        "scheduler.params.total_num_steps=100 but num_training_steps=6",
    ),
]


def run(folder: Path, runs: list[dict[str, Any]], ranks: int = 1) -> list[Any]:
    """What is logged at each step of each run, or what it is told."""
    sizes = {"per_device_train_batch_size": 4 // ranks, "gradient_accumulation_steps": 2, "save_steps": STEPS // 2}
    whole = [{**each, "args": {**sizes, **each["args"]}} for each in runs]
    found = launched("trainer_runs.py", folder, json.dumps(whole), by=torchrun(ranks) if ranks > 1 else ())
    return [each if isinstance(each, str) else [row for row in each["logs"] if "loss" in row] for each in found]


def check_losses(found: list[Any]) -> None:
    for case, logs in zip(RUNS.values(), found, strict=True):
        assert [row["loss"] for row in logs] == pytest.approx(case["losses"], rel=2e-6)


def test_losses_are_those_of_deepspeed_and_contradictions_are_refused(tmp_path: Path) -> None:
    names = [*RUNS]
    resumed = {**RUNS["decay"], "resume": str(tmp_path / str(names.index("decay")) / f"checkpoint-{STEPS // 2}")}
    others = [resumed, {"args": RUNS["auto"]["args"]}, OVERFLOWS]
    found = run(tmp_path, [*RUNS.values(), *others, *({"args": ARGS, **each} for each, _ in REFUSED)])
    check_losses(found[: len(names)])
    decay, auto = found[names.index("decay")], found[names.index("auto")]
    gone_on, plain, overflowing, *refused = found[len(names) :]
    assert [row["learning_rate"] for row in decay] == pytest.approx([0, 0, 0.005, 0.01, 0.0075, 0.005])
    assert gone_on == decay, "a resumed run has the schedule of the file"
    for row, want in zip(auto, plain, strict=True):
        assert row == pytest.approx(want, rel=1e-6)
    taken = [math.isfinite(row["grad_norm"]) for row in overflowing]
    assert not taken[0]
    assert taken[-1]
    want = [1e-2 * (1 - sum(taken[:step]) / STEPS) for step in range(STEPS)]
    rates = [row["learning_rate"] for row in overflowing]
    assert rates == pytest.approx(want), "the schedule stands still on skipped steps"
    for (_, told), message in zip(REFUSED, refused, strict=True):
        assert isinstance(message, str), told
        assert told in message
        assert "\n" not in message


@pytest.mark.full(
    "tests/integrations/test_deepspeed_trainer.py::test_losses_are_those_of_deepspeed_and_contradictions_are_refused"
)
def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    states = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    runs = [{**case, "deepspeed": {**case["deepspeed"], "zero_optimization": states}} for case in RUNS.values()]
    check_losses(run(tmp_path, runs, ranks=2))
