"""Check for update rules that mix the elements of a parameter, which only ZeRO itself may cut.

On a tile, or on a part along another mesh axis, such a rule would silently compute wrong updates.
"""

from __future__ import annotations

from collections.abc import Iterable

from dzero.parallel.tiling.state_dicts import tiled
from dzero.zero.shard import Sharded


def check_whole(names: Iterable[str], sharded: Sharded, rule: str) -> None:
    """Raise ValueError if tiles or a mesh axis cut a parameter of `names`; the message says that `rule` requires it."""
    tiles = {part for _, cut, parts in tiled(sharded.model) if cut.dim is not None for part in parts}
    splits = {shape.name: shape.split for unit in sharded.shapes for shape in unit.params}
    for name in names:
        split, needs = splits[name], f"{rule} needs parameters whole: take"
        if split is not None and split.dim is not None:
            raise ValueError(
                f"{name} is cut along the axis {split.axis} as well, and {needs} mesh.{split.axis}=1, or "
                "optim.rule=adamw"
            )
        if name in tiles:
            raise ValueError(f"{name} is a tile, and {needs} block.tiles=1, or optim.rule=adamw")
