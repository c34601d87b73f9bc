"""Boxes: the part of a tensor that one rank, or one file, holds; row-major, as DTensor cuts and safetensors stores."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """[offset, offset + size) along every dim of a tensor; a scalar's has none."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def elems(self) -> int:
        """Elements in it."""
        return math.prod(self.size)

    def common(self, other: Box) -> Box | None:
        """What lies in both; None where nothing does."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(low, size) if all(each > 0 for each in size) else None

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Where it lies in the tensor that holds `within`."""
        return tuple(slice(o - w, o - w + n) for o, n, w in zip(self.offset, self.size, within.offset, strict=True))

    def rows(self, within: Box) -> tuple[int, int]:
        """[first, last) elements of the row-major `within` that hold it, whole rows along the first dim."""
        if not self.size:
            return 0, 1
        row = math.prod(within.size[1:])
        first = self.offset[0] - within.offset[0]
        return first * row, (first + self.size[0]) * row

    def narrow(self, first: int, rows: int) -> Box:
        """`rows` of its rows from `first` on."""
        return Box((self.offset[0] + first, *self.offset[1:]), (rows, *self.size[1:]))


def covered(boxes: list[Box]) -> int:
    """Elements in boxes that do not overlap. Raises ValueError for two that do."""
    # Sorted by their first row, only neighbours whose rows meet need a look: shards are slabs, or slabs cut once more.
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.size:
            active = [each for each in active if each.offset[0] + each.size[0] > box.offset[0]]
        if any(box.common(each) is not None for each in active) or (not box.size and active):
            raise ValueError(f"two parts overlap at {list(box.offset)}")
        active.append(box)
    return sum(box.elems for box in boxes)


def is_slab(box: Box, within: Box) -> bool:
    """Whether `box` is whole rows of `within`, so that its elements lie one after the other."""
    return box.offset[1:] == within.offset[1:] and box.size[1:] == within.size[1:]
