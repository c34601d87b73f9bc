"""Unsharded shapes, all that sizes and schedules are made from.

Unsharded along the data-parallel axes: where a model is cut along others too (tensor parallelism), it is what the ranks
of one data-parallel group have together, and `Split` says which part of the whole.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dzero.mesh import EXPERT, TENSOR


@dataclass(frozen=True)
class Split:
    """Part `index` of `count` equal ones of a parameter along `dim`, by an axis of the mesh; dim None: a copy of it.

    summed: of copies, whether each rank finds a part of the gradient, and the axis sums them.
    """

    axis: str
    dim: int | None
    index: int
    count: int
    summed: bool = True


@dataclass(frozen=True)
class ParamShape:
    """An unsharded parameter: its name in the model, shape, and whether it is trained. split: None for all of it.

    fused: its last two dims are one of the model as it was built, several results side by side
    (parallel/tensor/conv1d.py).
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    split: Split | None = None
    fused: bool = False

    @property
    def elems(self) -> int:
        """Elements of the unsharded parameter."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """Its shape in the model as it was built."""
        dim, count = (None, 1) if self.split is None else (self.split.dim, self.split.count)
        sizes = tuple(size * count if each == dim else size for each, size in enumerate(self.shape))
        return (*sizes[:-2], sizes[-2] * sizes[-1]) if self.fused else sizes

    def is_cut_by(self, axis: str) -> bool:
        """Whether ranks along `axis` have parts of it, not copies; those of tp have experts of their own."""
        if self.split is None or self.split.dim is None:
            return False
        return axis == self.split.axis or (axis, self.split.axis) == (TENSOR, EXPERT)

    @property
    def row_elems(self) -> int:
        """Elements of one index of dim 0."""
        return math.prod(self.shape[1:])

    def shard_elems(self, ranks: int, shares: int = 1) -> int:
        """Elements of the largest shard over dim 0, which is the size FSDP2 pads every shard to; or of the largest of
        so many `shares` of it."""
        rows = -(-self.shape[0] // ranks)
        return -(-rows // shares) * self.row_elems


@dataclass(frozen=True)
class UnitShape:
    """The parameters that are gathered in one collective, and reduced in one collective.

    closes_forward: forward ends with it, and backward begins with it: the output head, and the root.
    """

    name: str
    params: tuple[ParamShape, ...]
    closes_forward: bool = False

    @property
    def shared_by(self) -> int:
        """Ranks of which each has a part of the unit, being one of experts; else 1."""
        return max((p.split.count for p in self.params if p.split is not None and p.split.axis == EXPERT), default=1)

    def shard_elems(self, ranks: int, shares: int = 1, *, trainable_only: bool = False) -> int:
        """Elements of one rank's padded shards, or of its shares of them."""
        return sum(p.shard_elems(ranks, shares) for p in self.params if p.trainable or not trainable_only)


def rows_of(rows: int, *cuts: tuple[int, int]) -> tuple[int, int]:
    """(first, count) of what rank r of n has by `Shard(0)`, for each (r, n) in turn of what the one before left."""
    first = 0
    for rank, ranks in cuts:
        most = -(-rows // ranks)
        start = min(rank * most, rows)
        first, rows = first + start, min(most, rows - start)
    return first, rows
