"""Weights & Biases get the scalars of TensorBoard, and a run without an account trains all the same."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
from sample_records import SUMMARY, record_of

from dzero.monitor.config import MonitorConfig
from dzero.monitor.sinks import Monitor

NO_BOARD = MonitorConfig(tensorboard=False, wandb="a project", scalars_every_steps=2)


class Sent:
    """What a run of the library was told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_every_second_step_the_held_out_loss_and_the_summary_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    sent, given = Sent(), {}

    def init(**settings: Any) -> Sent:
        given.update(settings)
        return sent

    monkeypatch.setattr(wandb, "init", init)
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=4, resolved_config="train:\n  steps: 4\n") as monitor:
        for step in range(1, 5):
            monitor.step(record_of(step))
        monitor.held_out(4, 2.5)
        monitor.summary(SUMMARY)
    assert (given["project"], given["config"]) == ("a project", {"train": {"steps": 4}})
    assert [step for step, _ in sent.logged] == [2, 4, 4]
    assert sent.logged[0][1]["loss/train"] == record_of(2).loss
    assert sent.logged[2][1] == {"loss/held_out": 2.5, "perplexity/held_out": math.exp(2.5)}
    assert sent.summary["loss"] == SUMMARY.loss
    assert sent.summary["held_out_perplexity"] == math.exp(2.5)
    assert sent.finished


def test_the_library_itself_writes_a_run_that_can_be_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=2, resolved_config="{}") as monitor:
        monitor.step(record_of(2))
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # the library's own process writes the file, and may still do so
    while b"loss/train" not in written.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_service_that_cannot_be_reached_is_told_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def init(**_: Any) -> None:
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", init)
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=2) as monitor:
        monitor.step(record_of(2))
    assert "monitor.wandb=a project: nothing is sent: CommError: no network" in capsys.readouterr().out
