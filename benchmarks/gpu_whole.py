"""The whole program on a GPU: `python train.py`, a checkpoint, and a second run that goes on from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from devices import Device
from gpu_findings import Findings

ROOT = Path(__file__).parent.parent
ON_GPU = "launch.workers=1 zero.stage=3 train.steps=20 checkpoint.every=10"
ON_CPU = (
    "launch.device=cpu launch.workers=1 zero.stage=3 train.steps=4 checkpoint.every=2 model.hidden_size=32 "
    "model.layers=2 model.heads=2 model.kv_heads=1 model.ffn_size=48 train.sequence_tokens=32 "
    "train.microbatch_sequences=2 train.evaluate_batches=1"
)
ALWAYS = "monitor.log_every_steps=1 monitor.tensorboard=false"


def whole(device: Device, found: Findings, folder: Path) -> None:
    """Train, then train some steps more from the last checkpoint. Raises SystemExit where that went wrong."""
    if not device.on_gpu:
        found.stand_in("the program trains a smaller model on the CPU")
    words = (ON_GPU if device.on_gpu else ON_CPU).split()
    steps = int(re.findall(r"train\.steps=(\d+)", " ".join(words))[0])
    first = run(words, folder, found, "first")
    more = [word for word in words if not word.startswith("train.steps=")] + [f"train.steps={steps + steps // 2}"]
    second = run([*more, "resume=auto"], folder, found, "resumed")
    wanted = ([*range(1, steps + 1)], [*range(steps + 1, steps + steps // 2 + 1)])
    if (first["steps"], second["steps"]) != wanted:
        raise SystemExit(f"steps {first['steps']}, then {second['steps']}: wanted {wanted}")
    found.find(
        f"{steps} steps end with loss {first['losses'][-1]}, a second run goes on from step {steps} to "
        f"{second['losses'][-1]}; {first['tokens_per_s']} tokens/s"
    )


def run(words: list[str], folder: Path, found: Findings, name: str) -> dict[str, Any]:
    """Run the program and return what it logged."""
    line = [sys.executable, str(ROOT / "train.py"), *words, *ALWAYS.split()]
    ended = subprocess.run(line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(ended.stdout, flush=True)
    logged = re.findall(r"^step=(\d+) loss=(\S+)", ended.stdout, re.MULTILINE)
    speeds = re.findall(r"^step=.* tokens_per_s=(\d+)", ended.stdout, re.MULTILINE)
    told = {
        "steps": [int(step) for step, _ in logged],
        "losses": [loss for _, loss in logged],
        "tokens_per_s": speeds[-1] if speeds else "unknown",
        "exit_code": ended.returncode,
    }
    found.note(**{name: {**told, "end": ended.stdout[-2000:]}})
    if ended.returncode:
        raise SystemExit(f"the {name} run ended with {ended.returncode}")
    return told
