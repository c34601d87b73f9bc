"""What the randomised tools share: the ways of training that they hurt, and the row of figures that they leave."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from small_runs import ROOT
from train_runs import SMALLEST

RESULTS = ROOT / "benchmarks" / "results"
SMALL = [*SMALLEST, "launch.workers=2", "launch.threads=1", "checkpoint.every=1"]
DISK = "offload.disk.paths=[{folder}] offload.disk.block_bytes=8192"
WAYS = {
    "stage 0, device": "zero.stage=0",
    "stage 1, device, fp16": "zero.stage=1 precision=fp16",
    "stage 1, host, delayed": "zero.stage=1 offload=host offload.overlap=delayed offload.delay_warmup_steps=1",
    "stage 2, host": "zero.stage=2 offload=host",
    "stage 2, disk": f"zero.stage=2 offload=disk {DISK}",
    "stage 3, device, remainder": "zero.stage=3 precision=bf16_remainder",
    "stage 3, host, overlap backward": "zero.stage=3 offload=host offload.overlap=backward",
    "stage 3, everything on disk": f"zero.stage=3 offload=infinity {DISK}",
}


def count(of: str, default: int = 300) -> int:
    """How many, as the environment variable DZERO_`of` says."""
    return int(os.environ.get(f"DZERO_{of}", default))


def words(way: str, folder: Path) -> list[str]:
    """The settings of a way, with its disk in `folder`."""
    return WAYS[way].replace("{folder}", str(folder)).split()


def per_1000(numbers: Sequence[int], found: Sequence[float]) -> float:
    """How much more there is at least in the last quarter than in the third, per 1,000 of what `numbers` counts.

    At least: threads that are about to end, and memory that is free but not given back, come and go.
    """
    third, last = (
        [each for number, each in zip(numbers, found, strict=True) if start < 4 * number / numbers[-1] - 1 <= start + 1]
        for start in (1, 2)
    )
    return 1000 * (min(last) - min(third)) / (numbers[-1] / 4)


def write_row(name: str, question: str, file: str, of: dict[str, int], **figures: Any) -> None:
    """Write a row of figures into benchmarks/results, with hardware, versions and commit.

    of: the numbers that the environment gives, as `count` names them.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    given = " ".join(f"DZERO_{key}={value}" for key, value in of.items())
    row = {
        "question": question,
        "command": f"{given} pytest -m slow tests/stress/{Path(file).name}",
        **{key.lower(): value for key, value in of.items()},
        **figures,
        "hardware": f"{len(os.sched_getaffinity(0))} cores ({platform.machine()}), shared",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "backend": "gloo",
        "commit": commit.stdout.strip(),
    }
    (RESULTS / f"{name}.json").write_text(json.dumps(row, indent=2) + "\n")
