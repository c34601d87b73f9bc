"""No number that a setting can be given hangs or breaks the command: it is taken, or refused in a line."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from dzero import RunError, config, overrides
from dzero.config import CONF, RunConfig
from dzero.models.build import build, count
from dzero.plan.preflight import resolve_run
from dzero.plan.run_layout import check_all_here
from dzero.utils.ranges import divisors, whole

ABSURD = ("nan", "inf", "-inf", "-1", str(2**63), str(2**64), "1e308")
SLOW_S = 2.0
WITH = {  # what a setting needs to have an effect
    "checkpoint": "checkpoint.every=5",
    "scaler": "precision=fp16",
    "profile": "profile=on",
    "optim.muon": "optim.rule=muon",
    "offload.disk": "offload=disk",
    "hardware": "hardware=h100_80g",
    "schedule.decay_steps": "schedule.kind=wsd",
    "offload.prefetch_units": "offload=disk",
    "offload.undo_bytes": "offload=host offload.overlap=backward",
    "offload.delay_warmup_steps": "offload=host offload.overlap=delayed",
    **{f"offload.{kind}_fraction": "offload=infinity zero.stage=3" for kind in ("param", "grad", "master", "moments")},
    **{f"model.{key}": "model=tiny_moe" for key in ("experts", "top_k", "shared_experts", "balance_rate")},
    "data.vocab_size": "data.path=tokens.npy",
    "zero.reshard_after_forward": "zero.stage=3",
    "mesh.pp_stages_per_rank": "mesh.pp=2",
}


def numeric(owner: Any = RunConfig, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every setting that can be a number, and whether it can be a list of them."""
    for name, hint in get_type_hints(owner).items():
        arms = {hint, *get_args(hint), *(each for arm in get_args(hint) for each in get_args(arm))}
        for group in filter(dataclasses.is_dataclass, arms):
            yield from numeric(group, f"{prefix}{name}.")
        if arms & {int, float}:
            yield f"{prefix}{name}", any(str(arm).startswith("list") for arm in arms)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config.register()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


def refusal(words: list[str]) -> str | None:
    """What the command says to settings that it refuses; None where it takes them."""
    try:
        check_all_here(overrides.check(words, CONF))
    except RunError as error:
        return str(error)
    return None


NUMERIC = dict(numeric())


def test_every_group_has_numeric_settings_here() -> None:
    groups = {key.partition(".")[0] for key in NUMERIC}
    assert groups == {field.name for field in dataclasses.fields(RunConfig)} - {"auto", "export", "precision", "resume"}
    assert len(NUMERIC) > 80


@pytest.mark.product(keep=30)
@pytest.mark.parametrize("values", [("nan", str(2**64)), pytest.param(ABSURD, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("key", NUMERIC)
def test_absurd_numbers_are_refused_in_a_line_at_once(key: str, values: tuple[str, ...]) -> None:
    group = key.rpartition(".")[0]
    needed = WITH.get(key, WITH.get(group, "")).split()
    taken = []
    for value in values:
        word = f"{key}=[{value}]" if NUMERIC[key] else f"{key}={value}"
        began_s = time.process_time()
        told = refusal([*needed, word])
        assert time.process_time() - began_s < SLOW_S, f"{word} took long"
        if told is None:
            taken.append(value)
        else:
            assert key.rpartition(".")[2] in told, f"{word}: {told}"
            assert "\n" not in told
            assert "Traceback" not in told
    assert taken == []


@pytest.mark.parametrize(
    "settings",
    [
        "model.hidden_size=1000000000000",
        "model.hidden_size=67108862 model.heads=7",
        "mesh.dp=1000000007",
        "mesh.dp=1000003",
        "mesh.replicate=7 mesh.dp=1000000",
        "mesh.tp=7 mesh.dp=720720 launch.workers=720720",
        "launch.workers=1000000",
        "model.layers=1000000",
        f"train.steps={'9' * 5000}",
        "train.microbatch_sequences=1000000000",
        "zero=auto train.microbatch_sequences=1000000000",
        "zero.stage=3 zero.reshard_after_forward=7 mesh.dp=1000000",
    ],
)
def test_sizes_beyond_any_machine_are_refused_at_once(settings: str) -> None:
    began_s = time.process_time()
    told = refusal(settings.split())
    assert time.process_time() - began_s < SLOW_S
    assert told is not None
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("model.layers=10000 model.hidden_size=1536", "parameters alone would take"),
        ("model.hidden_size=67108864 model.heads=2048 model.kv_heads=2048", "parameters alone would take"),
        ("train.microbatch_sequences=1000000", "a hidden state of the microbatch alone would take"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_before_a_model_is_laid_out(settings: str, told: str) -> None:
    (run,) = overrides.check([*settings.split(), "train.sequence_tokens=100000"], CONF)
    began_s = time.process_time()
    with pytest.raises(RunError, match=told):
        resolve_run(run, [])
    assert time.process_time() - began_s < SLOW_S


def test_parameters_are_counted_as_the_model_has_them() -> None:
    for settings in ("model=tiny", "model=tiny model.tied=true", "model=tiny_moe model.shared_experts=2"):
        (run,) = overrides.check([*settings.split(), "model.vocab_size=300"], CONF)
        with torch.device("meta"):
            assert run.model.shape(300).params == count(build(run.model, 300))


def test_divisors_are_those_that_a_loop_finds() -> None:
    assert all(divisors(n) == [each for each in range(1, n + 1) if n % each == 0] for n in range(1, 500))
    assert divisors(10**12 + 39) == [1, 10**12 + 39]


def test_a_range_holds_no_nan_and_no_infinity() -> None:
    assert [value in whole(0, 5) for value in (0, 5, -1, 6, 10**400, float("nan"), float("inf"))] == [True] * 2 + [
        False
    ] * 5
