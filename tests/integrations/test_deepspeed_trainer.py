"""`DzeroTrainer(deepspeed=...)`: the losses of transformers with DeepSpeed itself, and its refusals.

deepspeed_losses.json was printed by deepspeed_runs.py beside DeepSpeed 0.19.8, one process on the CPU.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import deepspeed_runs
import pytest
from typed_commands import typed

HERE = Path(__file__).parent
RUNS: dict[str, Any] = json.loads((HERE / "deepspeed_losses.json").read_text())["runs"]
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
    ({"deepspeed": {}, "dzero": {"stage": 3}}, "dzero= and deepspeed=: both say how to shard; give one"),
    (
        {"deepspeed": {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100}}}},
        "scheduler.params.total_num_steps=100 but num_training_steps=6",
    ),
]


def run(folder: Path, runs: list[dict[str, Any]], ranks: int = 1) -> list[Any]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    words = [*launch, deepspeed_runs.__file__, folder, json.dumps(runs)]
    done = typed(*words, cwd=folder, env={"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[Any] = json.loads((folder / "results.json").read_text())
    return found


def test_losses_are_those_of_deepspeed_and_contradictions_are_refused(tmp_path: Path) -> None:
    resumed = {**RUNS["decay"], "resume": str(tmp_path / "1" / "checkpoint-3")}
    cases = [*RUNS.values(), resumed, {"args": RUNS["auto"]["args"]}, OVERFLOWS]
    found = run(tmp_path, [*cases, *({"args": ARGS, **each} for each, _ in REFUSED)])
    for case, logs in zip(cases[: len(RUNS)], found, strict=False):
        assert [row["loss"] for row in logs] == pytest.approx(case["losses"], rel=2e-6)
    decay = found[[*RUNS].index("decay")]
    assert [row["learning_rate"] for row in decay] == pytest.approx([0, 0, 0.005, 0.01, 0.0075, 0.005])
    assert found[len(RUNS)] == decay, "a resumed run has the schedule of the file"
    plain, auto = found[len(RUNS) + 1], found[[*RUNS].index("auto")]
    for row, want in zip(auto, plain, strict=True):
        assert row == pytest.approx(want, rel=1e-6)
    taken = [math.isfinite(row["grad_norm"]) for row in found[len(RUNS) + 2]]
    assert not taken[0]
    assert taken[-1]
    want = [1e-2 * (1 - sum(taken[:step]) / deepspeed_runs.STEPS) for step in range(deepspeed_runs.STEPS)]
    rates = [row["learning_rate"] for row in found[len(RUNS) + 2]]
    assert rates == pytest.approx(want), "the schedule stands still on skipped steps"
    for (_, told), message in zip(REFUSED, found[len(cases) :], strict=True):
        assert isinstance(message, str), told
        assert told in message
        assert "\n" not in message


@pytest.mark.full(
    "tests/integrations/test_deepspeed_trainer.py::test_losses_are_those_of_deepspeed_and_contradictions_are_refused"
)
def test_two_ranks_have_the_losses_of_one(tmp_path: Path) -> None:
    runs = []
    for case in RUNS.values():
        states = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
        runs.append(
            {
                "args": {**case["args"], "per_device_train_batch_size": 2},
                "deepspeed": {**case["deepspeed"], "zero_optimization": states},
            }
        )
    for case, logs in zip(RUNS.values(), run(tmp_path, runs, ranks=2), strict=True):
        assert [row["loss"] for row in logs] == pytest.approx(case["losses"], rel=2e-6)
