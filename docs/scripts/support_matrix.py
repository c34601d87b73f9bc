"""Page of what works together, from the table of rules in dzero/compatibility.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from dzero.compatibility import FACTS, RULES
from dzero.utils.rules import Rule, Settings, shown

FEATURES: dict[str, Mapping[str, Any]] = {
    "stage 0": {"zero.stage": 0},
    "stage 1": {"zero.stage": 1},
    "stage 2": {"zero.stage": 2},
    "stage 3": {"zero.stage": 3},
    "hybrid": {"mesh.replicate": 2, "axis.replicate": 2, "axis.shard": 4},
    "states over replicas": {"zero.optimizer_shard_axes": ["replicate", "shard"]},
    "resharding over N": {"zero.reshard_after_forward": 2},
    "16-bit masters": {"precision.master": "remainder", "precision.param": "bf16"},
    "8-bit moments": {"precision.moments": "int8"},
    "8-bit products": {"precision.compute": "fp8_rowwise", "precision.param": "bf16"},
    "parameters off device": {"offload.param": "host", "offload.master": "host"},
    "masters on host": {"offload.master": "host", "offload.moments": "host"},
    "masters on disk": {"offload.master": "disk", "offload.moments": "disk"},
    "update in backward": {"offload.overlap": "backward"},
    "activations off device": {"offload.activations": "host"},
    "recomputed blocks": {"block.activation_checkpoint": "full"},
    "compiled blocks": {"block.compile": True},
    "tiles": {"block.tiles": 2},
    "tensor": {"mesh.tp": 2},
    "context": {"mesh.cp": 2},
    "experts": {"mesh.ep": 2, "model.kind": "moe"},
    "pipeline": {"mesh.pp": 2},
    "zero bubble": {"mesh.pp": 2, "mesh.pp_schedule": "zero_bubble"},
    "Muon": {"optim.rule": "muon", "optim.needs": "parameters"},
    "torch's SGD": {"optim.rule": "SGD", "optim.needs": "elements"},
    "torch's Adafactor": {"optim.rule": "Adafactor", "optim.needs": "parameters"},
    "transformers": {"model.kind": "hf"},
    "LoRA": {"adapter.kind": "lora", "model.kind": "hf", "model.weights": True},
    "QLoRA": {"adapter.kind": "lora", "precision.frozen": "nf4", "model.kind": "hf", "model.weights": True},
}
"""Settings of each feature of the matrix."""
HIDDEN = tuple(key for key, phrase in FACTS.items() if not phrase)
WHOLE = {f"offload.{kind}_fraction": 1.0 for kind in ("master", "moments")}


def refusals() -> dict[str, dict[str, Rule]]:
    """Return, for each feature, the features that it does not go together with, and the rules that refuse them."""
    found: dict[str, dict[str, Rule]] = {name: {} for name in FEATURES}
    for first, second in combinations(FEATURES, 2):
        one, other = FEATURES[first], FEATURES[second]
        if all(one[key] == other[key] for key in one.keys() & other.keys()):
            settings = Settings({**WHOLE, **one, **other}, frozenset({*one, *other}))
            rule = next((rule for rule in RULES if rule.refuses(settings)), None)
            if rule is not None:
                found[first][second] = found[second][first] = rule
    return found


def _table(rules: list[Rule]) -> Iterator[str]:
    yield "| settings | why | instead |\n| --- | --- | --- |"
    for rule in rules:
        take = rule.take if isinstance(rule.take, str) else "named in the message"
        named = " ".join(f"`{each}`" for each in rule.when.split() if not each.startswith(HIDDEN))
        yield f"| {named.replace('|', chr(92) + '|')} | {rule.why} | {take} |"
    yield ""


def support() -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# What works together\n"
    yield "Everything on this page is made from the table of rules in `dzero/compatibility.py`, by which `train.py`,"
    yield "`dzero.shard` and `dzero plan` refuse settings in one line before anything starts.\n"
    yield "## Two features\n"
    yield "Each goes together with all others but those named; of the stages a run has one. The tables below say why.\n"
    yield "| feature | settings | not with |\n| --- | --- | --- |"
    for name, others in refusals().items():
        settings = " ".join(f"`{key}={shown(value)}`" for key, value in FEATURES[name].items() if key not in FACTS)
        yield f"| {name} | {settings} | {', '.join(others)} |"
    yield "\n## Refused\n"
    yield "Conditions hold together: `=` one of the values, `!=` none of them, a name alone any value.\n"
    yield from _table([rule for rule in RULES if not rule.idle])
    yield "## Without effect\n"
    yield "A setting that would change nothing is refused too, unless it is at its default.\n"
    yield from _table([rule for rule in RULES if rule.idle])
