"""Traces of chosen steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from dzero.monitor.config import ProfileConfig
from dzero.monitor.profile import Profiler

CPU = torch.device("cpu")


def run_traced(profiler: Profiler, steps: int) -> None:
    """Steps of one named span and one matmul each."""
    with profiler:
        for step in range(1, steps + 1):
            with record_function(f"step {step}"), record_function("all_gather unit layers.0"):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            profiler.step()


def spans_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def test_the_trace_holds_the_chosen_steps_and_the_codes_own_spans(tmp_path: Path) -> None:
    profiler = Profiler(ProfileConfig(enabled=True, start_step=3, steps=2), tmp_path, rank=1, device=CPU, run_steps=8)
    run_traced(profiler, 8)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank1.pt.trace.json.gz"]
    names = {span["name"] for span in spans_of(profiler.trace_path)}
    assert {name for name in names if name.startswith("step ")} == {"step 3", "step 4"}
    assert {"all_gather unit layers.0", "aten::mm"} <= names


def test_the_trace_may_start_with_step_2_and_end_with_the_last(tmp_path: Path) -> None:
    profiler = Profiler(ProfileConfig(enabled=True, start_step=2, steps=2), tmp_path, rank=0, device=CPU, run_steps=3)
    run_traced(profiler, 3)
    names = {span["name"] for span in spans_of(profiler.trace_path)}
    assert {name for name in names if name.startswith("step ")} == {"step 2", "step 3"}


def die_after_step_3(profiler: Profiler) -> None:
    with profiler:
        for step in (1, 2, 3):
            with record_function(f"step {step}"):
                torch.ones(8).sum()
            profiler.step()
        raise OSError("gone")


def test_a_run_that_dies_leaves_the_steps_that_were_traced(tmp_path: Path) -> None:
    profiler = Profiler(ProfileConfig(enabled=True, start_step=2, steps=5), tmp_path, rank=0, device=CPU, run_steps=9)
    with pytest.raises(OSError, match="gone"):
        die_after_step_3(profiler)
    assert {"step 2", "step 3"} <= {span["name"] for span in spans_of(profiler.trace_path)}


def test_disabled_it_writes_nothing(tmp_path: Path) -> None:
    run_traced(Profiler(ProfileConfig(), tmp_path, rank=0, device=CPU, run_steps=3), 3)
    assert not list(tmp_path.iterdir())


def test_settings_without_effect_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"profile\.steps=5 has no effect with profile\.enabled=false"):
        ProfileConfig(steps=5)
    with pytest.raises(ValueError, match=r"profile\.memory_snapshot=false has no effect"):
        ProfileConfig(memory_snapshot=False)
    with pytest.raises(ValueError, match=r"ends with step 12, but the run has 11"):
        Profiler(ProfileConfig(enabled=True), tmp_path, rank=0, device=CPU, run_steps=11)
    with pytest.raises(ValueError, match=r"memory_snapshot=true with the device cpu"):
        Profiler(ProfileConfig(enabled=True, memory_snapshot=True), tmp_path, rank=0, device=CPU, run_steps=20)


def test_impossible_steps_name_the_key() -> None:
    with pytest.raises(ValueError, match=r"profile\.start_step=1: must be a whole number ≥ 2"):
        ProfileConfig(enabled=True, start_step=1)
    with pytest.raises(ValueError, match=r"profile\.steps=0"):
        ProfileConfig(enabled=True, steps=0)


@pytest.mark.gpu
def test_on_cuda_the_allocations_are_kept_too(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    profiler = Profiler(
        ProfileConfig(enabled=True, start_step=2, steps=1), tmp_path, rank=0, device=device, run_steps=3
    )
    with profiler:
        for _ in range(3):
            torch.ones(8, device=device).sum().item()
            profiler.step()
    assert profiler.snapshot_path is not None
    assert profiler.snapshot_path.stat().st_size > 0
    assert profiler.trace_path.exists()
