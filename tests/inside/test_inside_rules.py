"""The table of settings that do not go together: each row is refused where a user meets it, and its advice helps.

It looks inside, because each row of the table is asked: `RULES` has an example of a command line for nearly all.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from from_words import refusal, run_of
from omegaconf import OmegaConf
from test_precedence import preset

from dzero import OffloadConfig, PrecisionConfig, ZeroConfig, config
from dzero.compatibility import FACTS, FOLLOWS_FROM, RULES, check_compatible
from dzero.config import RunConfig, TrainConfig
from dzero.data.config import DataConfig
from dzero.models.build import build, count
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.precedence import WHAT_IS_TRAINED
from dzero.utils.rules import Rule, Settings, shown
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OFFLOADS

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(hidden_size=36, layers=3, heads=6, ffn_size=50)
TYPED = [rule for rule in RULES if rule.example]
LIBRARY = {"zero", "precision", "offload", "axis"}
IN_PYTHON = {
    "zero.stage=0 axis.shard>1": {"zero.stage": 0, "axis.shard": 2},
    "precision.moments=int8 param.fused": {"precision.moments": "int8", "param.fused": "qkv.weight"},
    "optim.rule optim.needs=parameters param.fused": {
        "optim.rule": "muon",
        "optim.needs": "parameters",
        "param.fused": "qkv.weight",
    },
    "offload.frozen params.frozen=false": {"offload.frozen": "host", "params.frozen": False},
    "precision.frozen params.quantized=false": {"precision.frozen": "nf4", "params.quantized": False},
    "offload.frozen!=device|null mesh.ep>1": {"offload.frozen": "host", "mesh.ep": 2},
    "precision.frozen!=param mesh.ep>1": {"precision.frozen": "nf4", "mesh.ep": 2},
}
"""Settings of the rules that no command line meets; `tests/zero` and `tests/parallel` reach them by `shard`."""


@pytest.fixture(autouse=True)
def _schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    config.register()


def named(key: str) -> str:
    """How a message names a setting, before its value."""
    return FACTS.get(key, f"{key}={{}}").partition("{}")[0]


def is_of(rule: Rule, told: str) -> bool:
    """Whether a message has a rule's reason and names all of its settings."""
    return rule.why in told and all(named(key) in told for key in rule.conditions)


@pytest.mark.product(keep=12)
@pytest.mark.parametrize("rule", TYPED, ids=lambda rule: rule.when)
def test_a_command_line_is_refused_by_its_row(rule: Rule) -> None:
    told = refusal(*rule.example.split())
    assert told.startswith(named(next(iter(rule.conditions))))
    assert is_of(rule, told)
    assert "has no effect" in told if rule.idle else "; take " in told


@pytest.mark.full("tests/inside/test_inside_rules.py::test_a_command_line_is_refused_by_its_row")
@pytest.mark.parametrize("rule", [rule for rule in TYPED if isinstance(rule.take, str)], ids=lambda rule: rule.when)
def test_its_advice_lifts_the_refusal(rule: Rule) -> None:
    assert isinstance(rule.take, str)
    advised = re.search(r"\b[a-z]+\.[a-z_]+=[\w.]*\w", rule.take)
    if advised is None:
        pytest.skip("advice in words")
    key = advised[0].partition("=")[0]
    words = [word for word in rule.example.split() if word.partition("=")[0] != key]
    assert not is_of(rule, refusal(*words, advised[0]))


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.example], ids=lambda rule: rule.when)
def test_rules_that_only_python_meets_refuse(rule: Rule) -> None:
    with pytest.raises(ValueError, match=re.escape(rule.why) if rule.why else "has no effect"):
        check_compatible(Settings(IN_PYTHON[rule.when], changed=frozenset(IN_PYTHON[rule.when])))


def of_library(rule: Rule) -> bool:
    return {key.partition(".")[0] for key in rule.conditions} <= LIBRARY and bool(rule.example)


@pytest.mark.product(keep=4)
@pytest.mark.parametrize("rule", [rule for rule in RULES if of_library(rule)], ids=lambda rule: rule.when)
def test_the_library_refuses_the_same(rule: Rule) -> None:
    words = [word for word in rule.example.split() if not word.startswith("model=")]
    offload = next((word.partition("=")[2] for word in words if word.startswith("offload=")), "none")
    typed: Any = OmegaConf.to_object(
        OmegaConf.from_dotlist([word for word in words if not word.startswith("offload=")])
    )
    mesh = typed.get("mesh", {})
    replicate = mesh.get("replicate", 1)
    with pytest.raises(ValueError, match=re.escape(rule.why) if rule.why else "has no effect"):
        Layout.of(
            ZeroConfig(**typed.get("zero", {})),
            PrecisionConfig(**typed.get("precision", {})),
            OffloadConfig(**(vars(OFFLOADS[offload]) | typed.get("offload", {}))),
            replicate=replicate,
            shard=mesh.get("dp", 2) // replicate,
        )


def test_every_key_of_a_rule_is_a_setting_or_a_fact() -> None:
    """Settings are two levels deep, as the rules name them."""
    groups = {name: str(field.type) for name, field in RunConfig.__dataclass_fields__.items()}
    kinds = {name: vars(config)[kind] for name, kind in groups.items() if kind in vars(config)}
    known = {f"{group}.{name}" for group, kind in kinds.items() for name in kind.__dataclass_fields__}
    assert {key for rule in RULES for key in rule.conditions} <= known | FACTS.keys()


def test_the_page_of_what_works_together_names_every_rule() -> None:
    spec = importlib.util.spec_from_file_location("support_matrix", ROOT / "docs/scripts/support_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(matrix := importlib.util.module_from_spec(spec))
    page = "\n".join(matrix.support())
    assert all(f"| {rule.why} |" in page for rule in RULES)
    refused: Mapping[str, Mapping[str, Rule]] = matrix.refusals()
    assert {"tiles", "QLoRA"} <= refused["tensor"].keys()
    assert refused["tensor"].keys().isdisjoint({"LoRA", "experts"})
    assert "transformers" not in refused["context"]
    assert {"stage 0", "stage 1", "stage 2"} <= refused["parameters off device"].keys()
    assert "stage 3" not in refused["parameters off device"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: ZeroConfig(stage=False),
        lambda: ZeroConfig(stage=3.0),  # type: ignore[arg-type]
        lambda: BlockConfig(compile=1),  # type: ignore[arg-type]
        lambda: RunConfig(model=MODEL, data=DataConfig(held_out=0), train=TrainConfig(evaluate_every_steps=5)),
    ],
)
def test_values_of_another_type_pass_by_no_rule(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"zero\.stage=|block\.compile=|data\.held_out=0"):
        make()


TWO_SETTINGS = re.compile(r"\b[a-z]+\.[a-z_]+=[^;]*\bwith [a-z]+\.[a-z_]+=|has no effect with")
SIZES = {"models/config.py", "parallel/divisibility.py"}
"""Files that compare a setting with a size or with the kind of model that knows it."""


def test_no_other_file_refuses_two_settings() -> None:
    found = [
        f"{path.relative_to(ROOT / 'dzero').as_posix()}:{node.lineno}"
        for path in (ROOT / "dzero").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Raise) and node.exc is not None and TWO_SETTINGS.search(ast.unparse(node.exc))
    ]
    assert {each.partition(":")[0] for each in found} <= SIZES, found


# What is typed wins over a preset

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


DEFAULTS = RunConfig(model=MODEL).settings.defaults


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


@pytest.mark.full("tests/inside/test_inside_rules.py::test_a_command_line_is_refused_by_its_row")
@pytest.mark.parametrize("rule", TYPED, ids=lambda rule: rule.when)
def test_each_setting_of_each_rule_wins_or_has_a_reason_why_not(rule: Rule, tmp_path: Path) -> None:
    words = rule.example.split()
    decides = {source for key in rule.conditions for source in FOLLOWS_FROM.get(key, (key,))}
    for index, word in enumerate(words):
        key, beside = word.partition("=")[0], words[:index] + words[index + 1 :]
        if not any(is_part(key, each) or is_part(each, key) for each in decides):
            continue
        preset(tmp_path, beside)
        told = refusal("--config-name=preset", word, conf=tmp_path)
        if is_of(rule, told):
            assert reason(rule, key, changed(beside)), f"{word} over {beside}: {told}"


def test_parameters_are_counted_as_the_model_has_them() -> None:
    """A run that is far too large is refused by this number, before its model is laid out."""
    for line in ("model=tiny", "model=tiny model.tied=true", "model=tiny_moe model.shared_experts=2"):
        model = run_of(*line.split(), "model.vocab_size=300").model
        with torch.device("meta"):
            assert model.shape(300).params == count(build(model, 300))
