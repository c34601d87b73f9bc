"""No number that a setting can be given hangs or breaks the command: it is taken, or refused in a line."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from from_words import check_memory, refusal, run_of

from dzero import RunError

ABSURD = ("nan", "inf", "-inf", "-1", str(2**63), str(2**64), "1e308")
SLOW_S = 60.0  # of a processor, and a thousand times what it takes
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


def numeric(owner: Any, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Every setting that can be a number, and whether it can be a list of them."""
    for name, hint in get_type_hints(owner).items():
        arms = {hint, *get_args(hint), *(each for arm in get_args(hint) for each in get_args(arm))}
        for group in filter(dataclasses.is_dataclass, arms):
            yield from numeric(group, f"{prefix}{name}.")
        if arms & {int, float}:
            yield f"{prefix}{name}", any(str(arm).startswith("list") for arm in arms)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.chdir(tmp_path)


RUN = type(run_of())
NUMERIC = dict(numeric(RUN))


def test_every_group_has_numeric_settings_here() -> None:
    groups = {key.partition(".")[0] for key in NUMERIC}
    assert groups == {field.name for field in dataclasses.fields(RUN)} - {"auto", "export", "precision", "resume"}
    assert len(NUMERIC) > 80


@pytest.mark.product(keep=8)
@pytest.mark.parametrize("values", [("nan", str(2**64)), pytest.param(ABSURD, marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("key", NUMERIC)
def test_absurd_numbers_are_refused_in_a_line_at_once(key: str, values: tuple[str, ...]) -> None:
    group = key.rpartition(".")[0]
    needed = WITH.get(key, WITH.get(group, "")).split()
    taken = []
    for value in values:
        word = f"{key}=[{value}]" if NUMERIC[key] else f"{key}={value}"
        began_s = time.process_time()
        told = refusal(*needed, word)
        assert time.process_time() - began_s < SLOW_S, f"{word} took long"
        if not told:
            taken.append(value)
        else:
            assert key.rpartition(".")[2] in told, f"{word}: {told}"
            assert "\n" not in told
            assert "Traceback" not in told
    assert taken == []


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(
    "settings",
    [
        "model.hidden_size=1000000000000",
        "model.hidden_size=67108862 model.heads=7",
        "mesh.dp=1000000007",
        "mesh.tp=7 mesh.dp=720720 launch.workers=720720",
        f"train.steps={'9' * 5000}",
        "zero=auto train.microbatch_sequences=1000000000",
        "zero.stage=3 zero.reshard_after_forward=7 mesh.dp=1000000",
    ],
)
def test_sizes_beyond_any_machine_are_refused_at_once(settings: str) -> None:
    began_s = time.process_time()
    told = refusal(*settings.split())
    assert time.process_time() - began_s < SLOW_S
    assert told
    assert len(told) < 1000


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("model.hidden_size=67108864 model.heads=2048 model.kv_heads=2048", "parameters alone would take"),
        ("train.microbatch_sequences=1000000", "a hidden state of the microbatch alone would take"),
    ],
)
def test_sizes_that_no_memory_holds_are_refused_before_a_model_is_laid_out(settings: str, told: str) -> None:
    run = run_of(*settings.split(), "train.sequence_tokens=100000")
    began_s = time.process_time()
    with pytest.raises(RunError, match=told):
        check_memory(run, 16 << 30)
    assert time.process_time() - began_s < SLOW_S
