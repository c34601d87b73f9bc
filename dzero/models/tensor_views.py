"""Tensors made of stored ones: stacked, joined, narrowed or transposed, of which any box is read.

    view                                a box of it takes
    Stacked(parts, dim)                 a box of each part whose index is in the range along dim
    Joined(parts, dim)                  a box of each part that the range along dim meets
    Narrowed((part,), dim, first, rows) one box of the part
    Selected((part,), dim, index)       one box of the part
    Transposed((part,), dim0, dim1)     one box of the part
    RowNorms((part,))                   the rows of the part, whole

A box is read with no other bytes of the parts than its own elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Readable(Protocol):
    """A tensor of which any box can be read, from one stored tensor or several."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the stored tensors that it is made of."""

    @property
    def where(self) -> str:
        """Place that an error message names."""

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""

    def __call__(self) -> Tensor:
        """Read the whole tensor."""


class View(ABC):
    """Base of tensors that are made of others, `parts`; a subclass gives `shape` and `read`.

    A tensor of an impossible shape raises ValueError when it is constructed.
    """

    parts: tuple[Readable, ...]

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of the stored tensors that it is made of."""
        return tuple(name for part in self.parts for name in part.stored)

    @property
    def where(self) -> str:
        """Place of the first part, and the number of all stored tensors."""
        count = len(self.stored)
        return self.parts[0].where + (f" with {count - 1} more" if count > 1 else "")

    @abstractmethod
    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""

    def __call__(self) -> Tensor:
        """Read the whole tensor."""
        return self.read((0,) * len(self.shape), self.shape)


@dataclass(frozen=True)
class Stacked(View):
    """Tensors of one shape, stacked along a new dim."""

    parts: tuple[Readable, ...]
    dim: int

    def __post_init__(self) -> None:
        _check_alike(self.parts, None)
        _check_dim(self.dim, len(self.parts[0].shape) + 1, self.where)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        shape = self.parts[0].shape
        return (*shape[: self.dim], len(self.parts), *shape[self.dim :])

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        of_part = [(*each[: self.dim], *each[self.dim + 1 :]) for each in (offset, size)]
        first = offset[self.dim]
        found = [part.read(*of_part) for part in self.parts[first : first + size[self.dim]]]
        if not found:  # the dtype is known to the parts alone
            return self.parts[0].read(of_part[0], (0,) * len(of_part[1])).new_empty(tuple(size))
        return torch.stack(found, self.dim)


@dataclass(frozen=True)
class Joined(View):
    """Tensors joined along an existing dim; their other dims are equal."""

    parts: tuple[Readable, ...]
    dim: int

    def __post_init__(self) -> None:
        _check_dim(self.dim, len(self.parts[0].shape), self.where)
        _check_alike(self.parts, self.dim)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        shape = [*self.parts[0].shape]
        shape[self.dim] = sum(part.shape[self.dim] for part in self.parts)
        return tuple(shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        low, high, begin = offset[self.dim], offset[self.dim] + size[self.dim], 0
        found: list[Tensor] = []
        for part in self.parts:
            rows = part.shape[self.dim]
            first, last = max(low - begin, 0), min(high - begin, rows)
            if first < last:
                found.append(part.read(_put(offset, self.dim, first), _put(size, self.dim, last - first)))
            begin += rows
        if not found:
            return self.parts[0].read(_put(offset, self.dim, 0), size)
        return torch.cat(found, self.dim)


@dataclass(frozen=True)
class Narrowed(View):
    """The range [first, first + rows) of a tensor along a dim."""

    parts: tuple[Readable]
    dim: int
    first: int
    rows: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return _put(self.parts[0].shape, self.dim, self.rows)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        return self.parts[0].read(_put(offset, self.dim, offset[self.dim] + self.first), size)


@dataclass(frozen=True)
class Selected(View):
    """One index of a tensor along a dim, which is dropped."""

    parts: tuple[Readable]
    dim: int
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return (*self.parts[0].shape[: self.dim], *self.parts[0].shape[self.dim + 1 :])

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        at = self.dim
        found = self.parts[0].read((*offset[:at], self.index, *offset[at:]), (*size[:at], 1, *size[at:]))
        return found.squeeze(at)


@dataclass(frozen=True)
class Transposed(View):
    """A tensor with two of its dims exchanged."""

    parts: tuple[Readable]
    dim0: int
    dim1: int

    def __post_init__(self) -> None:
        for dim in (self.dim0, self.dim1):
            _check_dim(dim, len(self.parts[0].shape), self.where)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self._exchanged(self.parts[0].shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        found = self.parts[0].read(self._exchanged(offset), self._exchanged(size))
        return found.transpose(self.dim0, self.dim1).contiguous()

    def _exchanged(self, values: Sequence[int]) -> tuple[int, ...]:
        return _put(_put(values, self.dim0, values[self.dim1]), self.dim1, values[self.dim0])


def _put(values: Sequence[int], at: int, value: int) -> tuple[int, ...]:
    """Return `values` with another one at position `at`."""
    return (*values[:at], value, *values[at + 1 :])


def _check_dim(dim: int, dims: int, where: str) -> None:
    if not 0 <= dim < dims:
        raise ValueError(f"{where}: dim {dim} of a tensor with {dims} dims")


@dataclass(frozen=True)
class RowNorms(View):
    """Euclidean norms of the rows of a matrix [rows, columns], as a vector [rows] in fp32."""

    parts: tuple[Readable]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.parts[0].shape[:1]

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        (part,) = self.parts
        norms: Tensor = torch.linalg.norm(part.read((*offset, 0), (*size, part.shape[1])).float(), dim=1)
        return norms


def _check_alike(parts: Sequence[Readable], dim: int | None) -> None:
    """Raise ValueError unless all shapes are equal, except along `dim`."""

    def rest(part: Readable) -> tuple[int, ...]:
        return part.shape if dim is None or len(part.shape) <= dim else _put(part.shape, dim, 0)

    for part in parts:
        if rest(part) != rest(parts[0]):
            raise ValueError(
                f"{part.where} has shape {list(part.shape)}, {parts[0].where} {list(parts[0].shape)}: one parameter of "
                "the model is made of both, and they do not fit together"
            )
