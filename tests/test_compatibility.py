"""The table of settings that do not go together: each row is refused where a user meets it, and its advice helps."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from dzero import PrecisionConfig, RunError, ZeroConfig, config, overrides
from dzero.compatibility import FACTS, RULES, check_compatible
from dzero.config import RunConfig, TrainConfig
from dzero.data.config import DataConfig
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.plan.run_layout import check_all_here
from dzero.utils.rules import Rule, Settings
from dzero.zero.layout import Layout
from dzero.zero.offload_config import OFFLOADS

ROOT = Path(__file__).parents[1]
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


def refusal(line: str) -> str:
    """What a user reads who types `line` after `train.py`; empty if it would start."""
    try:
        check_all_here(overrides.check(line.split(), ROOT / "conf"), overrides.typed_keys(line.split()))
    except RunError as error:
        return str(error)
    return ""


def named(key: str) -> str:
    """How a message names a setting, before its value."""
    return FACTS.get(key, f"{key}={{}}").partition("{}")[0]


def is_of(rule: Rule, told: str) -> bool:
    """Whether a message has a rule's reason and names all of its settings."""
    return rule.why in told and all(named(key) in told for key in rule.conditions)


@pytest.mark.parametrize("rule", TYPED, ids=lambda rule: rule.when)
def test_a_command_line_is_refused_by_its_row(rule: Rule) -> None:
    told = refusal(rule.example)
    assert told.startswith(named(next(iter(rule.conditions))))
    assert is_of(rule, told)
    assert "has no effect" in told if rule.idle else "; take " in told


@pytest.mark.full
@pytest.mark.parametrize("rule", [rule for rule in TYPED if isinstance(rule.take, str)], ids=lambda rule: rule.when)
def test_its_advice_lifts_the_refusal(rule: Rule) -> None:
    assert isinstance(rule.take, str)
    advised = re.search(r"\b[a-z]+\.[a-z_]+=[\w.]*\w", rule.take)
    if advised is None:
        pytest.skip("advice in words")
    key = advised[0].partition("=")[0]
    words = [word for word in rule.example.split() if word.partition("=")[0] != key]
    assert not is_of(rule, refusal(" ".join([*words, advised[0]])))


@pytest.mark.parametrize("rule", [rule for rule in RULES if not rule.example], ids=lambda rule: rule.when)
def test_rules_that_only_python_meets_refuse(rule: Rule) -> None:
    with pytest.raises(ValueError, match=re.escape(rule.why) if rule.why else "has no effect"):
        check_compatible(Settings(IN_PYTHON[rule.when], changed=frozenset(IN_PYTHON[rule.when])))


def of_library(rule: Rule) -> bool:
    return {key.partition(".")[0] for key in rule.conditions} <= LIBRARY and bool(rule.example)


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
            type(OFFLOADS["none"])(**(shallow(OFFLOADS[offload]) | typed.get("offload", {}))),
            replicate=replicate,
            shard=mesh.get("dp", 2) // replicate,
        )


def shallow(of: Any) -> dict[str, Any]:
    return dict(vars(of))


def known_keys() -> set[str]:
    """The keys of all settings, two levels deep, as the rules name them."""
    groups = {
        name: getattr(field.type, "__name__", str(field.type)) for name, field in RunConfig.__dataclass_fields__.items()
    }
    modules = vars(config)
    return {
        f"{group}.{name}"
        for group, kind in groups.items()
        if kind in modules
        for name in modules[kind].__dataclass_fields__
    }


def test_every_key_of_a_rule_is_a_setting_or_a_fact() -> None:
    assert {key for rule in RULES for key in rule.conditions} <= known_keys() | FACTS.keys()


def support_matrix() -> Any:
    spec = importlib.util.spec_from_file_location("support_matrix", ROOT / "docs/scripts/support_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_what_works_together_names_every_rule() -> None:
    page = "\n".join(support_matrix().support())
    assert all(f"| {rule.why} |" in page for rule in RULES)
    refused: Mapping[str, Mapping[str, Rule]] = support_matrix().refusals()
    assert "tiles" in refused["tensor"]
    assert "QLoRA" in refused["tensor"]
    assert "LoRA" not in refused["tensor"]
    assert "transformers" not in refused["context"]
    assert {"stage 0", "stage 1", "stage 2"} <= refused["parameters off device"].keys()
    assert "stage 3" not in refused["parameters off device"]
    assert "experts" not in refused["tensor"]


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
