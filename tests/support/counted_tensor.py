"""A tensor in memory that is read box by box, as one in a file is."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


class Counted:
    """A tensor in memory that counts the elements that are read."""

    stored, where = ("counted",), "counted"

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self.shape, self.elems = tensor, tuple(tensor.shape), 0

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
        assert all(o >= 0 and o + n <= whole for o, n, whole in zip(offset, size, self.shape, strict=True))
        self.elems += self._tensor[box].numel()
        return self._tensor[box].clone()

    def __call__(self) -> Tensor:
        return self.read((0,) * len(self.shape), self.shape)
