"""Rows of every parameter that a rank is responsible for, the same in every run of a ladder.

Runs on one mesh are compared bit by bit, although one holds a parameter whole and another holds a shard. So each rank
compares only the rows that it holds in the configuration, even if it holds more. Between meshes, masters are compared
with whole tensors, and every element is taken from one rank (`verify/compare.py`). In sums, each of n replicas has the
weight 1/n, so that a fault in any of them shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from dzero.checkpoint.shard_boxes import HeldTensor, UntiledRows
from dzero.mesh import AXES, PIPELINE
from dzero.zero.layout import Layout
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit
from dzero.zero.unit_shapes import ParamShape, rows_of

Cut = tuple[int, int]
"""Index and number of ranks that divide the remaining rows, or that hold replicas."""


@dataclass
class AnsweredParams:
    """Rows of all parameters of a run that this rank is responsible for.

    Attributes:
        held: Boxes of the rows, by parameter; for a tile, within the parameter that was tiled.
        first: Parameters of which this rank holds the first replica.
        weight: One by the number of replicas, by parameter.
    """

    held: dict[str, HeldTensor] = field(default_factory=dict)
    first: set[str] = field(default_factory=set)
    weight: dict[str, float] = field(default_factory=dict)


class AnsweredRows:
    """Selection of the rows that this rank is responsible for, out of the tensors that it holds.

    The layout is that of the configuration, which determines the rows; `sharded` is the model of the run.
    """

    def __init__(self, sharded: Sharded, layout: Layout) -> None:
        self._layout = layout
        self._groups = {axis: group for axis, group in sharded.model_groups.items() if axis != PIPELINE}
        stages = sharded.stages
        self._tied, self._has_first = ({*stages.shared}, stages.has_first) if stages is not None else (set(), True)
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
                replicas = [copy, *self._copies(shape)]
                placed.weight[own] = 1 / math.prod(each for _, each in replicas)
                if not any(number for number, _ in replicas):
                    placed.first.add(own)

    def mine(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of a parameter, of which it holds `flat`: all, a shard, or a replica shard."""
        shape, cuts, held = self._shapes[name], self._cuts[name], flat.numel()
        left = cuts
        for taken in range(len(cuts) + 1):
            if held == rows_of(shape.shape[0], *cuts[:taken])[1] * shape.row_elems:
                left = cuts[taken:]
        first, rows = rows_of(held // shape.row_elems, *left)
        return flat[first * shape.row_elems : (first + rows) * shape.row_elems]

    def _of(self, unit: Unit) -> tuple[tuple[Cut, ...], Cut]:
        """Return the cuts along the shard axis and, for replica shards, among replicas; and (replica, replicas)."""
        replicas, shards = (unit.mesh.get_group(axis) for axis in AXES)
        number, ranks = replicas.rank() * shards.size() + shards.rank(), replicas.size() * shards.size()
        own = self._layout.of_unit(unit.shape)
        if ranks != own.ranks:  # not the mesh of the configuration
            return ((number, ranks),), (0, 1)
        copy, part = divmod(number, own.shard)
        if self._layout.replica_shards > 1:
            return ((part, own.shard), (copy, self._layout.replica_shards)), (0, 1)
        return ((part, own.shard),), (copy, own.replicate)

    def _copies(self, shape: ParamShape) -> list[Cut]:
        """Return the replicas along the model axes; a tied parameter is at both ends of a pipeline."""
        copied = [(group.rank(), group.size()) for axis, group in self._groups.items() if not shape.is_cut_by(axis)]
        return [*copied, (int(not self._has_first), 2)] if shape.name in self._tied else copied
