"""`DzeroTrainer(deepspeed=...)`: the losses of transformers with DeepSpeed itself, and its refusals.

deepspeed_losses.json was printed by deepspeed_runs.py beside DeepSpeed 0.19.8, one process on the CPU.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import deepspeed_runs
import pytest
import torch

from dzero.integrations.deepspeed.advice import advise
from dzero.integrations.deepspeed.reading import read
from dzero.integrations.deepspeed.trainer import TrainerConfig
from dzero.integrations.deepspeed.translation import translate

transformers = pytest.importorskip("transformers")

HERE = Path(__file__).parent
CORPUS = sorted((HERE / "deepspeed_configs").glob("*.json"))
RUNS: dict[str, Any] = json.loads((HERE / "deepspeed_losses.json").read_text())["runs"]
ARGS = {"learning_rate": 1e-2}
OVERFLOWS: dict[str, Any] = {
    "args": {**ARGS, "fp16": True},
    "deepspeed": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}},
}
AUTO: dict[str, Any] = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
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
    line = [sys.executable, *launch, deepspeed_runs.__file__, str(folder), json.dumps(runs)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
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


@pytest.mark.full
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


@pytest.mark.parametrize("path", CORPUS, ids=[path.stem for path in CORPUS])
def test_the_advised_arguments_agree_with_the_file(path: Path, tmp_path: Path) -> None:
    translation = translate(read(path), ranks=1)
    if translation.refused:
        return
    advised = advise(translation, ranks=1).arguments
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **{"max_steps": 5, **advised})
    optim = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    found = TrainerConfig(path, args)
    assert (found.scheduler(optim, args.max_steps, args) is None) == (translation.schedule is None)


def test_what_accelerate_launch_says_fills_auto(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    assert TrainerConfig({"bf16": {"enabled": "auto"}}, args).settings["precision"] == "bf16"
    assert TrainerConfig({"zero_optimization": {"stage": 1}}, args).settings["precision"] == "bf16"


def test_no_warm_up_is_told_as_0(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True)
    rates = []
    for steps in (0, "auto"):
        params = {"total_num_steps": "auto", "warmup_num_steps": steps}
        optim = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        schedule = TrainerConfig({"scheduler": {"type": "WarmupDecayLR", "params": params}}, args).scheduler(
            optim, 4, args
        )
        for _ in range(4):
            rates.append(schedule.get_last_lr())
            optim.step()
            schedule.step()
    assert rates[:4] == rates[4:]
