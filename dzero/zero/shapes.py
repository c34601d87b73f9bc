"""Unsharded shapes, all that sizes and schedules are made from."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ParamShape:
    """An unsharded parameter: its name in the model, shape, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    trainable: bool

    @property
    def elems(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    def shard_elems(self, ranks: int) -> int:
        """Elements of the largest shard over dim 0, which is the size FSDP2 pads every shard to."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class UnitShape:
    """The parameters that are gathered in one collective, and reduced in one collective."""

    name: str
    params: tuple[ParamShape, ...]

    def shard_elems(self, ranks: int, *, trainable_only: bool = False) -> int:
        """Elements of one rank's padded shards."""
        return sum(p.shard_elems(ranks) for p in self.params if p.trainable or not trainable_only)
