"""train.py refuses what cannot fit this machine before anything starts, and names a setting that is accepted then."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from dzero import RunError
from dzero.config import RunConfig
from dzero.estimate.forecast import tiers_of
from dzero.hardware import format_bytes
from dzero.overrides import composed
from dzero.plan import preflight
from dzero.plan.preflight import check_memory, needed, resolve_run, suggestions, this_machine

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"
MIB = 1 << 20
SMALL = ["model.hidden_size=64", "model.layers=4", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]


def run_of(*settings: str) -> RunConfig:
    return composed([*SMALL, "zero.stage=0", *settings], CONF)


def need_of(config: RunConfig) -> int:
    here = this_machine(config, 1 << 40)
    return tiers_of(needed(config), here, 2)["device"].total_bytes


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> object:
    """Sets how much memory this machine seems to have, for each of two ranks."""

    def has(count: int) -> None:
        monkeypatch.setattr(preflight, "host_memory_bytes", lambda: 2 * count)
        monkeypatch.setattr(preflight, "host_available_bytes", lambda: 2 * count)

    return has


def test_train_refuses_a_run_that_is_too_large_within_seconds_and_starts_nothing(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "train.py"), "model=llama_70b", "offload=none"]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    began_s = time.monotonic()
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert time.monotonic() - began_s < 120, "an idle machine takes a tenth of it"
    assert run.returncode == 1
    assert run.stdout == ""
    assert "error: this run cannot fit this machine, so it was not started:" in run.stderr
    assert "short (most of it: " in run.stderr
    assert "launch.check_memory=false" in run.stderr


@pytest.mark.full
@pytest.mark.parametrize("mesh", ["mesh.tp=2 mesh.dp=1", "mesh.pp=2 mesh.dp=1 train.accumulate=2", "mesh.dp=2"])
def test_every_rank_has_its_part_of_the_node_whatever_it_shares(host: object, mesh: str) -> None:
    config = run_of("zero.stage=1", *mesh.split())
    need = need_of(config)
    host(need - 1)  # type: ignore[operator]
    with pytest.raises(RunError, match=rf"needs {format_bytes(need)} of .*: 1 B short"):
        check_memory(config)


def test_it_is_refused_where_it_surely_cannot_fit_and_warned_of_near_that(
    host: object, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_of()
    need = need_of(config)
    host(need - 1)  # type: ignore[operator]
    with pytest.raises(RunError, match=rf"needs {format_bytes(need)} of .*: 1 B short"):
        check_memory(config)
    host(need + 1)  # type: ignore[operator]
    check_memory(config)
    assert "warning: the device will be nearly full, or too small" in capsys.readouterr().err
    host(2 * need)  # type: ignore[operator]
    check_memory(config)
    assert capsys.readouterr().err == ""


@pytest.mark.full
def test_what_it_names_is_accepted_then(host: object) -> None:
    config = run_of()
    here = this_machine(config, 2 * int(0.8 * need_of(config)))
    named = suggestions(config, here)
    assert named
    assert all("zero.stage" in each or "block" in each or "train" in each for each in named)
    host(int(0.8 * need_of(config)))  # type: ignore[operator]
    with pytest.raises(RunError, match="would fit: "):
        check_memory(config)
    for each in named:
        given = [*SMALL, "zero.stage=0", *each.split()]
        check_memory(composed(given, CONF))


def test_what_no_setting_could_make_fit_is_told(host: object) -> None:
    host(MIB // 8)  # type: ignore[operator]
    with pytest.raises(RunError, match="no stage, tier, recomputation or microbatch would fit"):
        check_memory(run_of())


def test_it_can_be_switched_off(host: object) -> None:
    host(MIB // 8)  # type: ignore[operator]
    config = run_of("launch.check_memory=false")
    assert resolve_run(config, []) == config


def test_a_model_that_cannot_be_foreseen_is_told_and_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, has_fp8: bool) -> None:
        raise TypeError("its own code wants values")

    monkeypatch.setattr(preflight, "costs_for", fails)
    check_memory(run_of())
    assert capsys.readouterr().err == "warning: memory was not checked: TypeError: its own code wants values\n"


def test_under_torchrun_one_rank_of_a_node_tells(host: object, monkeypatch: pytest.MonkeyPatch) -> None:
    host(MIB // 8)  # type: ignore[operator]
    monkeypatch.setattr(preflight, "LINGER_S", 0.0)
    for key, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(SystemExit):
        resolve_run(run_of(), [])
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(RunError, match="cannot fit"):
        resolve_run(run_of(), [])


def test_a_model_of_transformers_is_checked_too() -> None:
    pytest.importorskip("transformers")
    config = composed(["model=hf", "model.name_or_path=gpt2"], CONF)
    small = replace(config, train=replace(config.train, microbatch_sequences=1))
    assert need_of(small) > 124_439_808 * (2 + 2 + 12 // 2)
