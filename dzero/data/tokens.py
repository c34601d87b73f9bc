"""Sequences of token ids: one logical 1-D array over parts in memory or in memory-mapped files.

A corpus is never copied: a sequence is a tuple of array views, and only the spans that are read become new arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dzero.data.config import MOST_IDS, TOKEN_DTYPES
from dzero.errors import converting

ZIP = b"PK\x03\x04"
NPY_ERRORS = (ValueError, EOFError, OverflowError, SyntaxError, TypeError, KeyError, IndexError, MemoryError)
"""Errors that numpy raises for damaged headers."""
SCAN_TOKENS = 16 * 2**20

Array = NDArray[Any]


@dataclass(frozen=True)
class Tokens:
    """One-dimensional sequence of token ids.

    `len(tokens)` is the number of tokens. `tokens[a:b]` is an array [b - a], a view if it is within one of the 1-D
    integer `parts`, which are concatenated logically.
    """

    parts: tuple[Array, ...]
    name: str = "the token array"

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.ndim != 1 or part.dtype.kind not in "iu":
                raise ValueError(
                    f"{self.name}: token ids must be 1-D integers, not {part.dtype} of shape {[*part.shape]}"
                )

    def __len__(self) -> int:
        return int(self._bounds[-1])

    def __getitem__(self, span: slice) -> Array:
        start, stop, stride = span.indices(len(self))
        if stride != 1:
            raise ValueError(f"{self.name}: a span of tokens has no stride, got {stride}")
        pieces = [
            part[max(start - begin, 0) : stop - begin]
            for part, begin, end in self._spans(start, stop)
            if begin < stop and end > start
        ]
        if len(pieces) == 1:
            return pieces[0]
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def split(self, at: int, names: tuple[str, str]) -> tuple[Tokens, Tokens]:
        """Return the first `at` tokens and the rest, as views."""
        head, tail = [], []
        for part, begin, end in self._spans(0, len(self)):
            cut = min(max(at - begin, 0), end - begin)
            head.append(part[:cut])
            tail.append(part[cut:])
        return Tokens(tuple(head), names[0]), Tokens(tuple(tail), names[1])

    @cached_property
    def _bounds(self) -> NDArray[np.int64]:
        """Offset at which each part begins, and the total length: [parts + 1]."""
        return np.cumsum([0, *(len(part) for part in self.parts)], dtype=np.int64)

    def _spans(self, start: int, stop: int) -> list[tuple[Array, int, int]]:
        """Return (part, begin, end) of the parts that may overlap [start, stop)."""
        first = max(int(np.searchsorted(self._bounds, start, side="right")) - 1, 0)
        last = int(np.searchsorted(self._bounds, stop, side="left"))
        bounds = self._bounds[first : last + 1].tolist()
        return list(zip(self.parts[first:last], bounds[:-1], bounds[1:], strict=True))


def map_tokens(path: Path, dtype: str) -> Array:
    """Memory-map a token file as [tokens]: a raw `.bin` file of `dtype`, or a 1-D integer `.npy` file.

    Raise ValueError if it is empty, truncated, or not an array of token ids.
    """
    size_bytes = path.stat().st_size
    if size_bytes == 0:
        raise ValueError(f"{path} is empty (0 bytes): remove it or write it again")
    if path.suffix == ".bin":
        width_bytes = np.dtype(dtype).itemsize
        if size_bytes % width_bytes:
            raise ValueError(
                f"{path}: {size_bytes} bytes are no whole number of {dtype} ids; "
                f"set data.token_dtype to one of {[*TOKEN_DTYPES]}, or write the file again"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    with path.open("rb") as file:
        if file.read(len(ZIP)) == ZIP:
            raise ValueError(f"{path} is an .npz archive of arrays: write one array of ids with numpy.save")
    with converting(f"{path} is no .npy file of token ids", *NPY_ERRORS, repair="write it with numpy.save"):
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.size == 0:
        raise ValueError(
            f"{path} holds {array.dtype} of shape {[*array.shape]}; token ids must be 1-D integers, not empty"
        )
    return array


def largest_id(array: Array, name: str | Path) -> int:
    """Return the largest id in `array` by one sequential read in bounded memory; raise ValueError for an invalid id."""
    largest = 0
    for start in range(0, len(array), SCAN_TOKENS):
        block = array[start : start + SCAN_TOKENS]
        largest = max(largest, int(block.max()))
        if largest >= MOST_IDS:
            raise ValueError(f"{name}: token id {largest} is no id: there are at most {MOST_IDS}; write the file again")
        if block.dtype.kind == "i" and block.min() < 0:
            raise ValueError(
                f"{name}: token id {block.min()} is negative; correct data.token_dtype (.bin) or write it again"
            )
    return largest
