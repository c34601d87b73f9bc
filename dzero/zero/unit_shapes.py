"""Unsharded shapes, from which sizes and schedules are derived.

Shapes are unsharded along the data-parallel axes. If another axis cuts the model too (tensor parallelism), they are the
shapes that the ranks of one data-parallel group hold together, and `Split` locates them in the whole parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dzero.mesh import EXPERT, TENSOR
from dzero.zero.quantized_weights import WeightCodec


@dataclass(frozen=True)
class Split:
    """Part of a parameter on this rank, along an axis of the mesh that cuts the model.

    Attributes:
        axis: Name of the axis.
        dim: Dimension that is cut into equal parts; None for a replicated parameter.
        index: Index of this part.
        count: Number of parts.
        summed: Whether each rank has a partial gradient of a replicated parameter, and the axis sums these.
    """

    axis: str
    dim: int | None
    index: int
    count: int
    summed: bool = True


@dataclass(frozen=True)
class ParamShape:
    """Shape of an unsharded parameter.

    Attributes:
        name: Name in the model.
        shape: Size along each dimension.
        trainable: Whether it is trained.
        split: Place in the whole parameter, if another axis cuts or replicates it; otherwise None.
        fused: Whether its last two dimensions are one in the model as built, with several results side by side
            (parallel/tensor/conv1d.py).
        codec: Format in which it is stored, if quantized (`precision.frozen`).
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool
    split: Split | None = None
    fused: bool = False
    codec: WeightCodec | None = None

    @property
    def elems(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def whole(self) -> tuple[int, ...]:
        """Shape in the model as it was built."""
        dim, count = (None, 1) if self.split is None else (self.split.dim, self.split.count)
        sizes = tuple(size * count if each == dim else size for each, size in enumerate(self.shape))
        return (*sizes[:-2], sizes[-2] * sizes[-1]) if self.fused else sizes

    def is_cut_by(self, axis: str) -> bool:
        """Return whether ranks along `axis` hold different parts; experts differ along tp too."""
        if self.split is None or self.split.dim is None:
            return False
        return axis == self.split.axis or (axis, self.split.axis) == (TENSOR, EXPERT)

    @property
    def row_elems(self) -> int:
        """Number of elements at one index of dim 0."""
        return math.prod(self.shape[1:])

    def shard_elems(self, ranks: int, replica_shards: int = 1) -> int:
        """Return the elements of the largest of `ranks` shards over dim 0, to which FSDP2 pads every shard.

        With several `replica_shards`, return the elements of the largest of that many replica shards instead.
        """
        rows = -(-self.shape[0] // ranks)
        return -(-rows // replica_shards) * self.row_elems

    def shard_bytes(self, ranks: int, itemsize: int) -> int:
        """Return the stored bytes of the largest of `ranks` shards; `itemsize` is that of the working dtype."""
        if self.codec is None:
            return self.shard_elems(ranks) * itemsize
        return -(-self.shape[0] // ranks) * self.codec.row_bytes(self.row_elems)


@dataclass(frozen=True)
class UnitShape:
    """Parameters that are gathered in one collective, and reduced in one collective.

    Attributes:
        name: Name of the unit.
        params: Shapes of its parameters.
        closes_forward: Whether forward ends and backward begins with it, as with the output head and the root.
    """

    name: str
    params: tuple[ParamShape, ...]
    closes_forward: bool = False

    @property
    def shared_by(self) -> int:
        """Number of ranks that each have a part of the unit's experts, or 1."""
        return max((p.split.count for p in self.params if p.split is not None and p.split.axis == EXPERT), default=1)

    def shard_elems(self, ranks: int, replica_shards: int = 1, *, trainable_only: bool = False) -> int:
        """Return the elements of one rank's padded shards, or of its replica shards."""
        return sum(p.shard_elems(ranks, replica_shards) for p in self.params if p.trainable or not trainable_only)

    def shard_bytes(self, ranks: int, itemsize: int) -> int:
        """Return the stored bytes of one rank's padded shards; `itemsize` is that of the working dtype."""
        return sum(p.shard_bytes(ranks, itemsize) for p in self.params)

    def ordered(self, names: Sequence[str]) -> UnitShape:
        """Return the unit with its parameters in the order of `names`."""
        return replace(self, params=tuple(sorted(self.params, key=lambda param: names.index(param.name))))

    @property
    def quantized(self) -> bool:
        """Whether any of its parameters is stored quantized."""
        return any(p.codec is not None for p in self.params)


def rows_of(rows: int, *cuts: tuple[int, int]) -> tuple[int, int]:
    """Return (first, count) of the rows that `Shard(0)` leaves to rank r of n, for each cut (r, n) in turn."""
    first = 0
    for rank, ranks in cuts:
        most = -(-rows // ranks)
        start = min(rank * most, rows)
        first, rows = first + start, min(most, rows - start)
    return first, rows
