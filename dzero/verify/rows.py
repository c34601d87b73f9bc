"""Which rows of every parameter a rank answers for, in every run of a ladder.

Runs on one mesh place the same parameters otherwise, whole or in shards, and are compared bit by bit; so a rank answers
for the rows that it has in the configuration, whatever else it has. Between meshes, parts of other shapes are compared:
those are put together first (compare.py), for which every element counts once.
"""

from __future__ import annotations

import torch

from dzero.checkpoint.places import Held, boxes_of, corner
from dzero.mesh import AXES, PIPELINE
from dzero.zero.layout import Layout
from dzero.zero.shapes import ParamShape, rows_of
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit

Cut = tuple[int, int]
"""(rank, ranks), of the rows that are left."""


class Rows:
    """Of all parameters of a run on this rank. layout: the table of the configuration.

    `held`: where they lie, by parameter. `counting`: the parameters of which no other rank's copies count instead.
    """

    def __init__(self, sharded: Sharded, layout: Layout) -> None:
        self._layout = layout
        self._groups = {axis: group for axis, group in sharded.model_groups.items() if axis != PIPELINE}
        parts = sharded.parts
        self._elsewhere = {*parts.shared} if parts is not None and not parts.has_first else set()
        self._cuts: dict[str, tuple[Cut, ...]] = {}
        self._shapes: dict[str, ParamShape] = {}
        self.held: dict[str, Held] = {}
        self.counting: set[str] = set()
        for unit in sharded.units:
            cuts, counts = self._of(unit)
            for shape in unit.shape.params:
                self._cuts[shape.name], self._shapes[shape.name] = cuts, shape
                offset, size = corner(shape, *rows_of(shape.shape[0], *cuts))
                self.held[shape.name] = Held(shape.name, shape.whole, boxes_of(shape, offset, size), tuple(size))
                if counts and self._counts(shape):
                    self.counting.add(shape.name)

    def mine(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what it holds of a parameter, flat: the whole, a shard, or a part of one."""
        shape, cuts, held = self._shapes[name], self._cuts[name], flat.numel()
        left = cuts
        for taken in range(len(cuts) + 1):
            if held == rows_of(shape.shape[0], *cuts[:taken])[1] * shape.row_elems:
                left = cuts[taken:]
        first, rows = rows_of(held // shape.row_elems, *left)
        return flat[first * shape.row_elems : (first + rows) * shape.row_elems]

    def _of(self, unit: Unit) -> tuple[tuple[Cut, ...], bool]:
        """Cuts of the shard axis, then of a shard's copies where they share states; and whether no copy counts."""
        copies, shards = (unit.mesh.get_group(axis) for axis in AXES)
        number, ranks = copies.rank() * shards.size() + shards.rank(), copies.size() * shards.size()
        own = self._layout.of_unit(unit.shape)
        if ranks != own.ranks:  # another mesh than the configuration's
            return ((number, ranks),), True
        copy, part = divmod(number, own.shard)
        shares = self._layout.shares
        return ((part, own.shard), *(((copy, shares),) if shares > 1 else ())), shares > 1 or copy == 0

    def _counts(self, shape: ParamShape) -> bool:
        """Along the axes of the model."""
        copied = (group for axis, group in self._groups.items() if not shape.is_cut_by(axis))
        return shape.name not in self._elsewhere and not any(group.rank() for group in copied)
