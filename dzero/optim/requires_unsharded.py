"""What an update of one element depends on, and a check of rules that need whole parameters.

    needs         an update depends on                        on shards of ZeRO
    elements      the element alone: AdamW, SGD               every rank updates its shard
    parameters    other elements of its parameter: Muon       the owner updates it whole (optim/unsharded_updates.py)
    unknown       perhaps on other parameters: LBFGS          refused, since it would be silently wrong

On a tile, or on a part along ep, only a rule of elements is right. Parts along tp are put together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from dzero.compatibility import check_compatible
from dzero.parallel.tiling.state_dicts import tiled
from dzero.utils.rules import Settings
from dzero.zero.sharded import Sharded

ELEMENTS, PARAMETERS, UNKNOWN = "elements", "parameters", "unknown"
ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")
PARAMETERWISE = ("Adafactor", "Muon")
UNCUT: Mapping[str, int] = {"mesh.tp": 1, "mesh.ep": 1, "block.tiles": 1}
"""Settings of a model of which nothing but ZeRO cuts a parameter."""


def needs_of(rule: type[torch.optim.Optimizer], elementwise: bool | None = None) -> str:
    """Return what an update by a class needs (optim/requires_unsharded.py); `elementwise` as in `TorchOptimizer`."""
    if elementwise is not None:
        return ELEMENTS if elementwise else PARAMETERS
    name = rule.__name__ if _is_torchs(rule) else ""
    return ELEMENTS if name in ELEMENTWISE else PARAMETERS if name in PARAMETERWISE else UNKNOWN


def _is_torchs(rule: type[torch.optim.Optimizer]) -> bool:
    return rule.__module__.startswith("torch.optim")


def check_rule(rule: str, needs: str, settings: Settings) -> None:
    """Raise ValueError if a rule goes with no parameter of a layout; `check_whole` checks those that are cut."""
    check_compatible(settings.having({**UNCUT, "optim.rule": rule, "optim.needs": needs}))


def check_whole(names: Iterable[str], sharded: Sharded, rule: str, needs: str = PARAMETERS) -> None:
    """Raise ValueError if tiles or a mesh axis cut a parameter of `names`, which `optim.rule=rule` requires whole."""
    tiles = {part: len(parts) for _, cut, parts in tiled(sharded.model) if cut.dim is not None for part in parts}
    shapes = {shape.name: shape for unit in sharded.shapes for shape in unit.params}
    mixing = sharded.layout.settings.having({"optim.rule": rule, "optim.needs": needs})
    for name in names:
        split = shapes[name].split
        cuts: dict[str, Any] = {**UNCUT, "block.tiles": tiles.get(name, 1)}  # of this parameter alone
        if shapes[name].fused:
            cuts["param.fused"] = name
        if split is not None and split.dim is not None:
            cuts[f"mesh.{split.axis}"] = split.count
        try:
            check_compatible(mixing.having(cuts))
        except ValueError as error:
            raise ValueError(f"parameter {name}: {error}") from None
