"""train.py refuses what cannot fit this machine before anything starts, and names a setting that is accepted then."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from from_words import check_memory, predicted_bytes, run_of
from typed_commands import as_torchrun, refused, typed

from dzero import RunError

MIB = 1 << 20
SMALL = ["model.hidden_size=64", "model.layers=2", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]
LARGE = ["model.hidden_size=32768", "model.layers=5", "model.heads=256", "model.kv_heads=8", "model.ffn_size=106496"]
"""64 billion parameters."""


def small(*settings: str) -> Any:
    return run_of(*SMALL, "zero.stage=0", *settings)


def test_train_refuses_a_run_that_is_too_large_and_starts_nothing(tmp_path: Path) -> None:
    run = typed("train.py", *LARGE, cwd=tmp_path)
    told = refused(run, "this run cannot fit this machine, so it was not started:", "short (most of it: ")
    assert "launch.check_memory=false" in told
    assert run.stdout == ""


def test_it_is_refused_where_it_surely_cannot_fit_and_warned_of_near_that(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the two ranks has half of the machine."""
    run, need = small(), 2 * predicted_bytes(small())
    with pytest.raises(RunError, match=r"needs .* of .*: 2 B short"):
        check_memory(run, need - 4)
    check_memory(run, need + 2)
    assert "warning: the device will be nearly full, or too small" in capsys.readouterr().err
    check_memory(run, 2 * need)
    assert capsys.readouterr().err == ""


@pytest.mark.full("tests/plan/test_preflight.py::test_it_is_refused_where_it_surely_cannot_fit_and_warned_of_near_that")
@pytest.mark.parametrize("mesh", ["mesh.tp=2 mesh.dp=1", "mesh.pp=2 mesh.dp=1 train.accumulate=2"])
def test_every_rank_has_its_part_of_the_node_whatever_it_shares(mesh: str) -> None:
    run = small("zero.stage=1", *mesh.split())
    with pytest.raises(RunError, match=r"needs .* of .*: 2 B short"):
        check_memory(run, 2 * predicted_bytes(run) - 4)


@pytest.mark.full("tests/plan/test_preflight.py::test_what_no_setting_could_make_fit_is_told")
def test_what_it_names_is_accepted_then() -> None:
    has = 2 * int(0.8 * predicted_bytes(small()))
    with pytest.raises(RunError, match="would fit: ") as told:
        check_memory(small(), has)
    (line,) = (line for line in str(told.value).splitlines() if line.startswith("would fit: "))
    lines = line.removeprefix("would fit: ").split(" | ")
    assert lines
    for line in lines:
        check_memory(small(*line.split()), has)


def test_what_no_setting_could_make_fit_is_told() -> None:
    with pytest.raises(RunError, match="no stage, tier, recomputation or microbatch would fit"):
        check_memory(small(), MIB // 4)
    off = small("launch.check_memory=false")
    assert check_memory(off, MIB // 4) == off


def test_under_torchrun_one_rank_of_a_node_tells(tmp_path: Path) -> None:
    line = ["train.py", "train.microbatch_sequences=1000000", "train.sequence_tokens=100000"]
    ranks = as_torchrun() | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    refused(typed(*line, cwd=tmp_path, env=ranks), "cannot fit this machine")
    other = typed(*line, cwd=tmp_path, env=ranks | {"RANK": "1", "LOCAL_RANK": "1"})
    assert (other.returncode, other.stdout, other.stderr) == (1, "", "")


def test_models_of_transformers_are_checked_too(tmp_path: Path) -> None:
    """Of such a model the settings do not tell how many parameters and heads it has."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6}
    config = {"model_type": "llama", "vocab_size": 256, "num_key_value_heads": 6, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    words = ["model=hf", f"model.name_or_path={tmp_path}"]
    params = 2 * 256 * 96 + 2 * (4 * 96 * 96 + 3 * 96 * 64 + 2 * 96) + 96
    whole = run_of(*words, "zero.stage=0", "train.microbatch_sequences=1", "train.sequence_tokens=16")
    assert predicted_bytes(whole) > params * (2 + 2 + 12)
    with pytest.raises(RunError, match=r"tp=4 does not divide the model's heads=6, kv_heads=6"):
        check_memory(run_of(*words, "mesh.dp=1", "mesh.tp=4"), 1 << 40)


def test_a_model_that_cannot_be_foreseen_is_told_and_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an interleaved pipeline holds at once is not foreseen."""
    run = small("mesh.dp=1", "mesh.pp=2", "mesh.pp_schedule=interleaved", "train.accumulate=2", "model.layers=4")
    assert check_memory(run, MIB // 4) is not None
    assert "warning: memory was not checked: what mesh.pp_schedule=interleaved holds" in capsys.readouterr().err
