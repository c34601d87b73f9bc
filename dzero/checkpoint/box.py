"""Boxes: the parts of tensors that ranks and files hold, row-major as in DTensor and safetensors."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """Range [offset, offset + size) along every dim of a tensor; a scalar has no dims."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box that covers a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def elems(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.size)

    def common(self, other: Box) -> Box | None:
        """Return the intersection with `other`, or None if it is empty."""
        low = tuple(map(max, self.offset, other.offset))
        high = tuple(
            min(a + m, b + n) for a, m, b, n in zip(self.offset, self.size, other.offset, other.size, strict=True)
        )
        size = tuple(end - start for start, end in zip(low, high, strict=True))
        return Box(low, size) if all(each > 0 for each in size) else None

    def slices(self, within: Box) -> tuple[slice, ...]:
        """Return the slices that select this box in a tensor that holds `within`."""
        return tuple(slice(o - w, o - w + n) for o, n, w in zip(self.offset, self.size, within.offset, strict=True))

    def rows(self, within: Box) -> tuple[int, int]:
        """Return the elements [first, last) of the row-major `within` whose whole rows along dim 0 hold this box."""
        if not self.size:
            return 0, 1
        row = math.prod(within.size[1:])
        first = self.offset[0] - within.offset[0]
        return first * row, (first + self.size[0]) * row

    def span(self, within: Box) -> tuple[int, int]:
        """Return the elements [first, last) of the row-major `within` that this box is; it must be contiguous there."""
        strides = [math.prod(within.size[dim + 1 :]) for dim in range(len(within.size))]
        first = sum((o - w) * n for o, w, n in zip(self.offset, within.offset, strides, strict=True))
        return first, first + self.elems

    def narrow(self, first: int, rows: int) -> Box:
        """Return the box of `rows` rows that starts at row `first` of this box."""
        return Box((self.offset[0] + first, *self.offset[1:]), (rows, *self.size[1:]))


def covered(boxes: list[Box]) -> int:
    """Return the number of elements in `boxes`; raise ValueError if two boxes overlap."""
    # Shards are slabs, or slabs cut once more: sorted by first row, only neighbours whose rows meet can overlap.
    active: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.size:
            active = [each for each in active if each.offset[0] + each.size[0] > box.offset[0]]
        if any(box.common(each) is not None for each in active) or (not box.size and active):
            raise ValueError(f"two parts overlap at {list(box.offset)}")
        active.append(box)
    return sum(box.elems for box in boxes)


def is_slab(box: Box, within: Box) -> bool:
    """Return whether `box` consists of whole rows of `within`, so that its elements are contiguous there."""
    return box.offset[1:] == within.offset[1:] and box.size[1:] == within.size[1:]


def is_contiguous(box: Box, within: Box) -> bool:
    """Return whether the elements of `box` are contiguous in the row-major `within`."""
    whole = [mine == all_of_it for mine, all_of_it in zip(box.size, within.size, strict=True)]
    cut = max((dim for dim, is_whole in enumerate(whole) if not is_whole), default=0)
    return all(count == 1 for count in box.size[:cut])
