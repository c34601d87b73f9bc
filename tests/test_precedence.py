"""What a user types wins over what a preset says, where a rule excludes one of the two."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dzero import RunError, config, overrides
from dzero.compatibility import FACTS, FOLLOWS_FROM, RULES
from dzero.config import RunConfig
from dzero.models.config import ModelConfig
from dzero.plan.preflight import resolve_run
from dzero.plan.run_layout import check_all_here, settled
from dzero.precedence import WHAT_IS_TRAINED, GaveWay
from dzero.utils.rules import Rule, shown

DEFAULTS = RunConfig(model=ModelConfig(hidden_size=36, layers=3, heads=6, ffn_size=50)).settings.defaults
ROOT = Path(__file__).parents[1]
TYPED = [rule for rule in RULES if rule.example]
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
BOTH_TYPED = {
    "train.epochs=3 train.steps=20": "train.steps=20 has no effect with train.epochs=3",
    "train.global_sequences=32 train.accumulate=1 train.microbatch_sequences=4": "take train.accumulate=null",
    "precision=bf16_remainder precision.param=fp32": "take precision.master=fp32",
    "offload=host_all zero.stage=2": "offload.param=host with zero.stage=2",
    "adapter=lora model=hf model.name_or_path=gpt2 model.weights=true block.tiles=2": "take block.tiles=1",
    "optim.rule=muon block.tiles=2": "optim.rule=adamw",
}
ALONE = {
    "monitor.plan=false monitor.tensorboard=false": "monitor.plan=false has no effect",
    "checkpoint.keep=3": "take a checkpoint.every",
    "precision.feedback=true": "take precision.reduce=int8, int4 or fp8",
    "model=tiny_moe block.tiles=2": "experts are not cut",
    "adapter.r=8": "adapter.r=8 has no effect with adapter.kind=none",
    "adapter.lora_alpha=16": "adapter.lora_alpha=16 has no effect with adapter.kind=none",
}
"""Typed settings that belong to something that is off, or to another model."""
STAYS = {
    ("auto=true mesh.pp>1", "mesh.pp"): "a stage has to be chosen by who types mesh.pp",
    ("precision.grad!=auto|fp32 precision.param", "precision.grad"): "no repair names another dtype of parameters",
    ("schedule.kind=wsd schedule.decay_steps=null", "schedule.kind"): "nobody but the user knows the number",
    ("train.accumulate=null train.global_sequences=null", "train.accumulate"): "nobody but the user knows the number",
    ("export.which=best checkpoint.keep_best=false", "export.which"): "a best model needs a checkpoint.every",
    ("block.embedding_tiles>1 model.tied=true", "block.embedding_tiles"): "the model decides",
}
"""Reasons why a typed setting is refused beside one of a preset, by its rule and key, other than those of `reason`."""
CONDITIONS_OF_SIZE = ("axis.", "step.", "device", "model.experts")


@pytest.fixture(autouse=True)
def _schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config.register()


def run_of(line: str, conf: Path = config.CONF) -> tuple[RunConfig, list[GaveWay]]:
    """The run that a command line starts on as many ranks as it says, and what gave way there."""
    words = line.split()
    (run,) = overrides.check(words, conf)
    found, gave_way = settled(run, overrides.typed_keys(words, conf))
    return found, list(gave_way)


def value(run: RunConfig, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(run, group), name)


@pytest.mark.parametrize(("line", "values"), WON.items(), ids=list(WON))
def test_a_typed_setting_wins_over_a_preset(line: str, values: dict[str, Any]) -> None:
    run, _ = run_of(line)
    assert {key: value(run, key) for key in values} == values


@pytest.mark.parametrize(("line", "told"), {**BOTH_TYPED, **ALONE}.items(), ids=list({**BOTH_TYPED, **ALONE}))
def test_what_is_typed_together_or_belongs_to_something_that_is_off_stays_refused(line: str, told: str) -> None:
    with pytest.raises((RunError, ValueError)) as refused:
        run_of(line)
    assert told in str(refused.value)


def test_each_run_of_a_sweep_gives_way_by_itself() -> None:
    words = ["--multirun", "experiment=two_nodes", "mesh.dp=16", "zero.stage=0,3"]
    assert [run.mesh.replicate for run in overrides.check(words, config.CONF)] == [1, 2]


def test_settings_of_a_group_that_was_switched_off_give_way(tmp_path: Path) -> None:
    preset(tmp_path, ["offload=host", "offload.overlap=backward", "offload.undo_bytes=5"])
    run, _ = run_of("--config-name preset offload=none", tmp_path)
    assert (run.offload.overlap, run.offload.undo_bytes) == ("auto", 1 << 30)


def test_settings_of_a_source_give_way_to_another_source(tmp_path: Path) -> None:
    preset(tmp_path, ["data.kind=chat", "data.path=x.jsonl", "data.loss_on=all"])
    run, _ = run_of("--config-name preset data.kind=text", tmp_path)
    assert (run.data.kind, run.data.path, run.data.loss_on) == ("text", "x.jsonl", None)


def test_what_gave_way_stays_given_for_the_choice_of_zero_auto(capsys: pytest.CaptureFixture[str]) -> None:
    line = "zero=auto train.global_sequences=8 launch.workers=1 train.sequence_tokens=64 launch.check_memory=false"
    (run,) = overrides.check(line.split(), config.CONF)
    found = resolve_run(run, line.split())
    assert found.train.sequences(1) == 8
    assert capsys.readouterr().err.count("note: train.accumulate=null in place of 1, which does not go with ") == 1


def test_a_run_tells_once_what_gave_way(tmp_path: Path) -> None:
    words = ["train.global_sequences=8", "train.steps=1", "launch.workers=1", "train.sequence_tokens=32"]
    told = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words, "train.evaluate_batches=0", f"hydra.run.dir={tmp_path}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert told.returncode == 0, told.stderr
    assert told.stderr.count("note: ") == 1
    assert "note: train.accumulate=null in place of 1, which does not go with train.global_sequences=8" in told.stderr


def preset(folder: Path, words: list[str]) -> None:
    """Write the configuration `preset`, the default one with these settings, among those of the project."""
    shutil.copytree(config.CONF, folder, dirs_exist_ok=True)
    base: Any = OmegaConf.load(folder / "config.yaml")
    given = dict(word.split("=", 1) for word in words)
    for choice in base.defaults:
        for group in [] if isinstance(choice, str) else [key for key in choice if key in given]:
            choice[group] = given.pop(group)
    for key, text in given.items():
        OmegaConf.update(base, key, OmegaConf.create(f"v: {text.replace(':', ': ')}").v, force_add=True)
    OmegaConf.save(base, folder / "preset.yaml")


def named(key: str) -> str:
    return FACTS.get(key, f"{key}={{}}").partition("{}")[0]


def is_of(rule: Rule, told: str) -> bool:
    return rule.why in told and all(named(key) in told for key in rule.conditions)


def is_part(key: str, whole: str) -> bool:
    return key == whole or key.startswith(f"{whole}.")


def changed(words: list[str]) -> list[str]:
    """Keys that are given another value than their default."""
    given = dict(word.split("=", 1) for word in words)
    return [key for key, text in given.items() if shown(DEFAULTS.get(key)) != text]


def reason(rule: Rule, key: str, preset_keys: list[str]) -> str:
    """Why a rule may refuse the typed `key` beside a preset's settings; empty if it may not."""
    others = [each for each in rule.conditions if not is_part(each, key) and not is_part(key, each)]
    free = [each for each in others if each not in FACTS and not any(is_part(each, what) for what in WHAT_IS_TRAINED)]
    if any(is_part(key, each) or is_part(each, key) for each in WHAT_IS_TRAINED) and not free:
        return "the rest is of the model too"
    if not free:
        return "what is trained, the number of ranks and the device give way to no setting"
    if rule.idle and is_part(key, next(iter(rule.conditions))) and not any(each in preset_keys for each in others):
        return "what it belongs to is off by default"
    if any(each.startswith(CONDITIONS_OF_SIZE) for each in rule.conditions):
        return "a number that no other setting makes right"
    return STAYS.get((rule.when, key), "")


@pytest.mark.full
@pytest.mark.parametrize("rule", TYPED, ids=lambda rule: rule.when)
def test_each_setting_of_each_rule_wins_or_has_a_reason_why_not(rule: Rule, tmp_path: Path) -> None:
    words = rule.example.split()
    decides = {source for key in rule.conditions for source in FOLLOWS_FROM.get(key, (key,))}
    for index, word in enumerate(words):
        key, beside = word.partition("=")[0], words[:index] + words[index + 1 :]
        if not any(is_part(key, each) or is_part(each, key) for each in decides):
            continue
        preset(tmp_path, beside)
        line = ["--config-name=preset", word]
        told = ""
        try:
            check_all_here(overrides.check(line, tmp_path), overrides.typed_keys(line, tmp_path))
        except RunError as error:
            told = str(error)
        if is_of(rule, told):
            assert reason(rule, key, changed(beside)), f"{word} over {beside}: {told}"
