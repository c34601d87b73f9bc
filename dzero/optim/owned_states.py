"""Bytes of the states of a class that needs whole parameters, each on the rank that owns the parameter.

The class is tried on a small parameter whose dims have sizes of their own, so that each dim of a state shows which dim
of the parameter it follows: Adafactor keeps [rows, 1] and [1, cols] of a matrix [rows, cols].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dzero.optim.rank_assignment import ROOM_ELEMS, rounds_of
from dzero.optim.unsharded_class import INPUTS, cost_of
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

TRIED_SIZES = (3, 5, 7, 11, 13)
"""Sizes of a tried parameter's dims with more than one index. Further dims are tried in their own size."""


@dataclass(frozen=True)
class OwnedStates:
    """States that a class keeps whole on the owner of each parameter.

    Attributes:
        states_of: Returns the states of a parameter of a shape after one step.
    """

    states_of: Callable[[tuple[int, ...]], Mapping[str, Any]]

    def most_bytes(self, layout: Layout, units: Sequence[UnitShape], away: Collection[str]) -> tuple[int, int]:
        """Return the bytes on the device, and on the host, of the owner that has the most there.

        Args:
            layout: Layout of the model.
            units: Shapes of its units.
            away: Names of the parameters that are updated on the host.
        """
        shapes = [param for unit in units for param in unit.params if param.trainable]
        bytes_of = {kind: self._bytes(kind) for kind in {param.whole for param in shapes}}
        device, host = [0] * layout.shard, [0] * layout.shard
        for each in rounds_of(shapes, layout.shard, cost_of, ROOM_ELEMS // INPUTS):
            for rank, owned in enumerate(each):
                for param in owned:
                    tier = host if param.name in away else device
                    tier[rank] += bytes_of[param.whole]
        return max(device), max(host)

    def _bytes(self, shape: tuple[int, ...]) -> int:
        """Return the bytes of the states of a parameter, but for those of one number."""
        sizes = iter(TRIED_SIZES)
        tried = tuple(size if size == 1 else next(sizes, size) for size in shape)
        real = dict(zip(tried, shape, strict=True))
        tensors = [each for each in self.states_of(tried).values() if isinstance(each, torch.Tensor) and each.ndim]
        return sum(math.prod(real.get(size, size) for size in each.shape) * each.itemsize for each in tensors)
