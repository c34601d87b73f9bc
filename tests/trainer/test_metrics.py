"""What is noted of a step costs no time that grows with the model: sizes that stay are measured in the first steps."""

from __future__ import annotations

from pathlib import Path

import torch
from pool import Pool
from small_runs import settled, write_text

from dzero.config import RunConfig
from dzero.trainer.metrics import LEARNING_STEPS
from dzero.trainer.trainer import Trainer


def asked(rank: int, ranks: int, run: RunConfig, folder: Path) -> tuple[int, dict[str, int]]:
    """How often the optimizer is asked for the bytes of its states, and what is told of them at the end."""
    trainer = Trainer(run, folder, torch.device("cpu"))
    optim, times = trainer.optim, 0
    measure = optim.state_bytes

    def counted() -> dict[str, int]:
        nonlocal times
        times += 1
        return measure()

    optim.state_bytes = counted  # type: ignore[method-assign]
    summary = trainer.run()
    return times, {kind: summary.peak_bytes[rank][kind] for kind in ("master", "moments", "grad")}


def test_the_bytes_of_states_are_counted_in_the_first_steps_alone(pool: Pool, tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.txt")
    for rule in ("adamw", "SGD"):
        settings = ["train.steps=9", "zero.stage=2", f"optim.rule={rule}", "train.evaluate_batches=0"]
        if rule == "SGD":
            settings.append("optim.options={momentum:0.9}")
        for times, told in pool.run(asked, 2, settled(text, *settings), tmp_path, timeout_s=240.0):
            assert times <= LEARNING_STEPS + 1
            assert told["master"] > 0
            assert told["grad"] > 0
            assert told["moments"] == told["master"] * (2 if rule == "adamw" else 1)
