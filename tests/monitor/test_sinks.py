"""What reaches TensorBoard, and who writes at all."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console as Terminal
from sample_records import RECORD, SUMMARY, record_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dzero.monitor.config import MonitorConfig
from dzero.monitor.sinks import Monitor


def make_monitor(folder: Path, *, rank: int = 0, config: MonitorConfig | None = None) -> Monitor:
    return Monitor(
        config or MonitorConfig(),
        folder,
        rank=rank,
        total_steps=300,
        resolved_config="zero:\n  stage: 3",
        terminal=Terminal(file=StringIO()),
    )


def read_back(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_every_scalar_back(tmp_path: Path) -> None:
    with make_monitor(tmp_path) as monitor:
        for step in (1, 2, 3):
            monitor.step(record_of(step))
        monitor.held_out(3, 3.25)
    events = read_back(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        *("loss/train", "loss/held_out", "perplexity/held_out"),
        *("speed/tokens_per_s", "speed/mfu", "speed/step_s", "speed/tokens"),
        *("optim/lr", "optim/grad_norm", "optim/loss_scale", "optim/skipped_steps"),
        *("memory/param_gib", "memory/moments_gib", "traffic/all_gather_gib", "traffic/reduce_scatter_gib"),
    }
    losses = [(point.step, point.value) for point in events.Scalars("loss/train")]
    assert losses == [(step, pytest.approx(5.5 - 0.01 * step)) for step in (1, 2, 3)]
    assert events.Scalars("traffic/reduce_scatter_gib")[0].value == pytest.approx(2000 / 2**30)
    assert events.Scalars("memory/moments_gib")[0].value == pytest.approx(54 / 1024)
    assert events.Scalars("loss/held_out")[0].step == 3
    assert events.Scalars("perplexity/held_out")[0].value == pytest.approx(25.790340)


def test_tensorboard_keeps_config_notes_and_summary_as_text(tmp_path: Path) -> None:
    with make_monitor(tmp_path) as monitor:
        monitor.note(2, "skipped")
        monitor.summary(SUMMARY)
    events = read_back(tmp_path)

    def text(name: str) -> str:
        return str(events.Tensors(f"{name}/text_summary")[0].tensor_proto.string_val[0].decode())

    assert text("config") == "```yaml\nzero:\n  stage: 3\n```"
    assert "skipped" in text("note")
    assert re.search(r"held-out loss +2\.5000", text("summary"))


def test_notes_of_one_step_are_one_entry(tmp_path: Path) -> None:
    with make_monitor(tmp_path) as monitor:
        monitor.note(0, "1.62 M parameters")
        monitor.note(0, "resumed from step_00000100")
        monitor.step(record_of(1))
        monitor.note(1, "skipped")
    entries = read_back(tmp_path).Tensors("note/text_summary")
    told = [(entry.step, entry.tensor_proto.string_val[0].decode()) for entry in entries]
    assert told == [(0, "```\n1.62 M parameters\nresumed from step_00000100\n```"), (1, "```\nskipped\n```")]


def test_scalars_can_be_thinned(tmp_path: Path) -> None:
    with make_monitor(tmp_path, config=MonitorConfig(scalars_every_steps=2)) as monitor:
        for step in range(1, 6):
            monitor.step(record_of(step))
    assert [point.step for point in read_back(tmp_path).Scalars("loss/train")] == [2, 4]


def test_only_rank_0_writes(tmp_path: Path) -> None:
    with make_monitor(tmp_path, rank=1) as monitor:
        monitor.step(RECORD)
        monitor.summary(SUMMARY)
    assert not monitor.sinks
    assert not list(tmp_path.iterdir())


def test_tensorboard_can_be_off(tmp_path: Path) -> None:
    with make_monitor(tmp_path, config=MonitorConfig(tensorboard=False)) as monitor:
        monitor.step(RECORD)
    assert not list(tmp_path.iterdir())


def test_impossible_settings_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"monitor\.log_every_steps=0"):
        MonitorConfig(log_every_steps=0)
    with pytest.raises(ValueError, match=r"monitor\.plan=false has no effect"):
        MonitorConfig(tensorboard=False, plan=False)
    with pytest.raises(ValueError, match=r"scalars_every_steps=5 has no effect"):
        MonitorConfig(tensorboard=False, scalars_every_steps=5)


def test_a_run_has_ten_thousand_points_unless_it_is_told_otherwise() -> None:
    every = {steps: MonitorConfig().scalars_every(steps) for steps in (1, 9_999, 10_000, 10_001, 1_000_000)}
    assert every == {1: 1, 9_999: 1, 10_000: 1, 10_001: 2, 1_000_000: 100}
    assert MonitorConfig(scalars_every_steps=7).scalars_every(1_000_000) == 7
