"""Which rows of every parameter a rank answers for, in every run of a ladder.

Runs on one mesh place the same parameters otherwise, whole or in shards, and are compared bit by bit; so a rank answers
for the rows that it has in the configuration, whatever else it has. Between meshes, masters are compared with whole
ones, for which every element is taken of one rank (compare.py); in sums, a copy among n weighs 1/n, so that a fault in
any is seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from dzero.checkpoint.shard_boxes import HeldTensor, UntiledRows
from dzero.mesh import AXES, PIPELINE
from dzero.zero.layout import Layout
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit
from dzero.zero.unit_shapes import ParamShape, rows_of

Cut = tuple[int, int]
"""(rank, ranks), of the rows that are left, or of copies."""


@dataclass
class AnsweredParams:
    """Of all parameters of a run, where this rank's rows lie, and what they count.

    `held`: by parameter; of tiles, in the parameter that was tiled. `first`: the parameters of which no other rank's
    copies come before this one's. `weight`: by parameter, one by the number of copies.
    """

    held: dict[str, HeldTensor] = field(default_factory=dict)
    first: set[str] = field(default_factory=set)
    weight: dict[str, float] = field(default_factory=dict)


class AnsweredRows:
    """Cuts what a rank has to the rows it answers for. layout: the table of the configuration."""

    def __init__(self, sharded: Sharded, layout: Layout) -> None:
        self._layout = layout
        self._groups = {axis: group for axis, group in sharded.model_groups.items() if axis != PIPELINE}
        parts = sharded.parts
        self._tied, self._has_first = ({*parts.shared}, parts.has_first) if parts is not None else (set(), True)
        self._cuts: dict[str, tuple[Cut, ...]] = {}
        self._shapes: dict[str, ParamShape] = {}
        self.placed = placed = AnsweredParams()
        as_built = UntiledRows(sharded.model)
        for unit in sharded.units:
            cuts, copy = self._of(unit)
            for shape in unit.shape.params:
                own = shape.name
                self._cuts[own], self._shapes[own] = cuts, shape
                placed.held[own] = as_built.held(shape, *rows_of(shape.shape[0], *cuts))
                copies = [copy, *self._copies(shape)]
                placed.weight[own] = 1 / math.prod(each for _, each in copies)
                if not any(number for number, _ in copies):
                    placed.first.add(own)

    def mine(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """This rank's rows of what it holds of a parameter, flat: the whole, a shard, or a part of one."""
        shape, cuts, held = self._shapes[name], self._cuts[name], flat.numel()
        left = cuts
        for taken in range(len(cuts) + 1):
            if held == rows_of(shape.shape[0], *cuts[:taken])[1] * shape.row_elems:
                left = cuts[taken:]
        first, rows = rows_of(held // shape.row_elems, *left)
        return flat[first * shape.row_elems : (first + rows) * shape.row_elems]

    def _of(self, unit: Unit) -> tuple[tuple[Cut, ...], Cut]:
        """Cuts of the shard axis, then of a shard's copies where they share states; and (copy, copies)."""
        copies, shards = (unit.mesh.get_group(axis) for axis in AXES)
        number, ranks = copies.rank() * shards.size() + shards.rank(), copies.size() * shards.size()
        own = self._layout.of_unit(unit.shape)
        if ranks != own.ranks:  # another mesh than the configuration's
            return ((number, ranks),), (0, 1)
        copy, part = divmod(number, own.shard)
        if self._layout.shares > 1:
            return ((part, own.shard), (copy, self._layout.shares)), (0, 1)
        return ((part, own.shard),), (copy, own.replicate)

    def _copies(self, shape: ParamShape) -> list[Cut]:
        """Along the axes of the model; a tied parameter is at both ends of a pipeline."""
        copied = [(group.rank(), group.size()) for axis, group in self._groups.items() if not shape.is_cut_by(axis)]
        return [*copied, (int(not self._has_first), 2)] if shape.name in self._tied else copied
