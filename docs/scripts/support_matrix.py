"""Page of what works together, from the table of rules in dzero/compatibility.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from dzero.compatibility import RULES
from dzero.utils.rules import Rule, Settings

FEATURES: dict[str, Mapping[str, Any]] = {
    "stage 0": {"zero.stage": 0, "mesh.replicate": 1},
    "stage 1": {"zero.stage": 1},
    "stage 2": {"zero.stage": 2},
    "stage 3": {"zero.stage": 3},
    "hybrid": {"axis.replicate": 2, "axis.shard": 4},
    "states over replicas": {"zero.states_over": "all"},
    "resharding over N": {"zero.reshard_after_forward": 2},
    "16-bit masters": {"precision.master": "remainder", "precision.param": "bf16"},
    "8-bit moments": {"precision.moments": "int8"},
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
    "Muon": {"optim.rule": "muon", "optim.takes_whole": True},
    "torch's SGD": {"optim.rule": "SGD", "optim.takes_whole": False},
    "transformers": {"model.kind": "hf"},
}
"""Settings of each feature of the matrix."""
WHOLE = {f"offload.{kind}_fraction": 1.0 for kind in ("master", "moments")}


def refusals() -> dict[tuple[str, str], Rule]:
    """Return the rule that refuses each pair of features, if one does."""
    found = {}
    for first, second in combinations(FEATURES, 2):
        one, other = FEATURES[first], FEATURES[second]
        if all(one[key] == other[key] for key in one.keys() & other.keys()):
            settings = Settings({**WHOLE, **one, **other})
            rule = next((rule for rule in RULES if not rule.idle and rule.refuses(settings)), None)
            if rule is not None:
                found[first, second] = rule
    return found


def _table(rules: list[Rule]) -> Iterator[str]:
    yield "| settings | why | instead |\n| --- | --- | --- |"
    for rule in rules:
        take = rule.take if isinstance(rule.take, str) else "named in the message"
        named = " ".join(
            f"`{each}`" for each in rule.when.split() if not each.startswith(("optim.elementwise", "optim.takes_whole"))
        )
        yield f"| {named.replace('|', chr(92) + '|')} | {rule.why} | {take} |"
    yield ""


def support() -> Iterator[str]:
    """Yield the lines of the page."""
    yield "# What works together\n"
    yield "Everything on this page is made from the table of rules in `dzero/compatibility.py`, by which `train.py`,"
    yield "`dzero.shard` and `dzero plan` refuse settings in one line before anything starts.\n"
    yield "## Two features\n"
    yield "A blank works. A cross is refused; the tables below say why.\n"
    refused, names = refusals(), [*FEATURES]
    yield "| | " + " | ".join(names[:-1]) + " |"
    yield "| --- |" + " :-: |" * (len(names) - 1)
    for row, second in enumerate(names[1:], 1):
        cells = ["✗" if (first, second) in refused else "" for first in names[:row]]
        yield f"| {second} | " + " | ".join(cells + [""] * (len(names) - 1 - row)) + " |"
    yield "\n## Refused\n"
    yield "Conditions hold together: `=` one of the values, `!=` none of them, a name alone any value.\n"
    yield from _table([rule for rule in RULES if not rule.idle])
    yield "## Without effect\n"
    yield "A setting that would change nothing is refused too, unless it is at its default.\n"
    yield from _table([rule for rule in RULES if rule.idle])
