"""What a user types wins over what a preset says, where a rule excludes one of the two."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from from_words import CONF, refusal, resolved, runs_of, started
from omegaconf import OmegaConf
from typed_commands import as_torchrun, typed

CHAT = "--config-name finetune model.name_or_path=gpt2 data.path=x.jsonl train.sequence_tokens=512"
WON = {
    f"{CHAT} train.steps=20": {"train.epochs": None, "train.steps": 20},
    f"{CHAT} train.steps=200": {"train.epochs": None, "train.steps": 200},
    "train.global_sequences=8 launch.workers=1": {"train.accumulate": None},
    "train.global_sequences=2 launch.workers=1": {"train.microbatch_sequences": 2, "train.accumulate": 1},
    "experiment=node_of_8 train.global_sequences=16 mesh.dp=8": {"train.accumulate": None},
    "experiment=two_nodes zero.stage=0 mesh.dp=16": {"mesh.replicate": 1},
    "experiment=gpus_512 block.tiles=2 mesh.dp=64": {"mesh.tp": 1},
    "experiment=two_nodes precision.reduce=int8 mesh.dp=16": {"mesh.replicate": 1},
    "train.global_sequences=8 train.accumulate=4 launch.workers=1": {"train.microbatch_sequences": 2},
    "schedule.decay_steps=10": {"schedule.kind": "wsd"},
    "offload.activations=host": {"block.activation_checkpoint": "full"},
    "offload.param=host": {"zero.stage": 3, "offload.master": "host"},
}
"""Command lines of which one word excludes what a preset or a default says, and what the run has then."""


@pytest.fixture(autouse=True)
def _schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def value(run: Any, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(run, group), name)


@pytest.mark.parametrize(("line", "values"), WON.items(), ids=list(WON))
def test_a_typed_setting_wins_over_a_preset(line: str, values: dict[str, Any]) -> None:
    run, _ = started(*line.split())
    assert {key: value(run, key) for key in values} == values


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("train.epochs=3 train.steps=20", "train.steps=20 has no effect with train.epochs=3"),
        ("precision=bf16_remainder precision.param=fp32", "take precision.master=fp32"),
        ("offload=host_all zero.stage=2", "offload.param=host with zero.stage=2"),
        ("adapter=lora model=hf model.name_or_path=gpt2 model.weights=true block.tiles=2", "take block.tiles=1"),
    ],
)
def test_what_is_typed_together_stays_refused(line: str, told: str) -> None:
    """Settings that belong to something that is off are refused alone: tests/inside/test_inside_rules.py."""
    assert told in refusal(*line.split())


def test_each_run_of_a_sweep_gives_way_by_itself() -> None:
    words = ["--multirun", "experiment=two_nodes", "mesh.dp=16", "zero.stage=0,3"]
    assert [run.mesh.replicate for run in runs_of(*words)] == [1, 2]


def test_settings_of_a_group_that_was_switched_off_give_way(tmp_path: Path) -> None:
    preset(tmp_path, ["offload=host", "offload.overlap=backward", "offload.undo_bytes=5"])
    run, _ = started("--config-name", "preset", "offload=none", conf=tmp_path)
    assert (run.offload.overlap, run.offload.undo_bytes) == ("auto", 1 << 30)


def test_settings_of_a_source_give_way_to_another_source(tmp_path: Path) -> None:
    preset(tmp_path, ["data.kind=chat", "data.path=x.jsonl", "data.loss_on=all"])
    run, _ = started("--config-name", "preset", "data.kind=text", conf=tmp_path)
    assert (run.data.kind, run.data.path, run.data.loss_on) == ("text", "x.jsonl", None)


@pytest.mark.full("tests/test_precedence.py::test_a_run_tells_once_what_gave_way")
def test_what_gave_way_stays_given_for_the_choice_of_zero_auto(capsys: pytest.CaptureFixture[str]) -> None:
    line = "zero=auto train.global_sequences=8 launch.workers=1 train.sequence_tokens=64 launch.check_memory=false"
    assert resolved(*line.split()).train.sequences(1) == 8
    assert capsys.readouterr().err.count("note: train.accumulate=null in place of 1, which does not go with ") == 1


def test_a_run_tells_once_what_gave_way(tmp_path: Path) -> None:
    sizes = ["model.hidden_size=32", "model.layers=1", "model.heads=2", "model.kv_heads=1", "model.ffn_size=48"]
    words = ["train.global_sequences=8", "train.steps=1", "train.sequence_tokens=32", "train.evaluate_batches=0"]
    told = typed("train.py", *sizes, *words, "monitor.plan=false", cwd=tmp_path, env=as_torchrun())
    assert told.returncode == 0, told.stderr
    assert told.stderr.count("note: ") == 1
    assert "note: train.accumulate=null in place of 1, which does not go with train.global_sequences=8" in told.stderr


def preset(folder: Path, words: list[str]) -> None:
    """Write the configuration `preset`, the default one with these settings, among those of the project."""
    shutil.copytree(CONF, folder, dirs_exist_ok=True)
    base: Any = OmegaConf.load(folder / "config.yaml")
    given = dict(word.split("=", 1) for word in words)
    for choice in base.defaults:
        for group in [] if isinstance(choice, str) else [key for key in choice if key in given]:
            choice[group] = given.pop(group)
    for key, text in given.items():
        OmegaConf.update(base, key, OmegaConf.create(f"v: {text.replace(':', ': ')}").v, force_add=True)
    OmegaConf.save(base, folder / "preset.yaml")
