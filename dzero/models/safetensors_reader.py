"""Reader for tensors, or any box of them, in the safetensors files of a folder.

Headers are untrusted: sizes, offsets and shapes must agree with each other and with the file before any data is read.
Files must be in the folder itself; of symbolic links, only those of Hugging Face's cache are followed
(utils/hub_cache.py).
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from dzero.hardware import FILE_DTYPES
from dzero.utils.hub_cache import opened, read_bytes

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
MOST_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library itself."""


T = TypeVar("T")


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class StoredTensor:
    """A row-major tensor that starts at byte `start` of `file`."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def stored(self) -> tuple[str, ...]:
        """Its own name; see `tensor_views.Readable`."""
        return (self.name,)

    @property
    def where(self) -> str:
        """File and name, for messages."""
        return f"{self.file}: {self.name}"

    def __call__(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        return self.read((0,) * len(self.shape), self.shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, and no other bytes, as a CPU tensor.

        Raise ValueError if the dtype is not in `FILE_DTYPES`, or the file is truncated.
        """
        if self.dtype not in FILE_DTYPES:
            raise ValueError(f"{self.file}: {self.name} is {self.dtype}; known are {', '.join(FILE_DTYPES)}")
        found = torch.empty(tuple(size), dtype=FILE_DTYPES[self.dtype])
        if not found.numel():
            return found
        cut = [dim for dim, (n, whole) in enumerate(zip(size, self.shape, strict=True)) if n != whole]
        last = cut[-1] if cut else 0  # the wanted elements are contiguous from this dim on
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        run = math.prod(size[last:]) * found.element_size()
        first = sum(o * stride for o, stride in zip(offset, strides, strict=True))
        out = found.view(-1).view(torch.uint8).numpy().data
        with opened(self.file) as fd:
            for number, at in enumerate(itertools.product(*(range(n) for n in size[:last]))):
                elems = first + sum(o * stride for o, stride in zip(at, strides, strict=False))
                self._fill(fd, out[number * run : (number + 1) * run], self.start + elems * found.element_size())
        return found

    def _fill(self, fd: int, out: memoryview, start: int) -> None:
        while out:
            count = os.preadv(fd, [out], start)
            if not count:
                raise ValueError(f"{self.file}: it ends at byte {start}, within {self.name}: it was cut short")
            out, start = out[count:], start + count


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Return the tensors of all files in the index, or of the single file, by name; read only headers.

    A file that is missing, damaged, or a symbolic link out of the repository is an error.
    """
    files = [SINGLE]
    if os.path.lexists(folder / INDEX):
        index = _decode(read_bytes(folder / INDEX), _Index, folder / INDEX)
        files = sorted(set(index.weight_map.values()))
    found: dict[str, StoredTensor] = {}
    for name in files:
        file = folder / name
        if file.parent != folder or not (file.is_file() or file.is_symlink()):
            raise FileNotFoundError(f"{file}: no such file; weights are {SINGLE} or {INDEX} in {folder}")
        found |= _tensors(file)
    return found


def _tensors(file: Path) -> dict[str, StoredTensor]:
    """Return the tensors of one file, by name."""
    with opened(file) as fd:
        size = os.fstat(fd).st_size
        length = int.from_bytes(os.pread(fd, 8, 0), "little")
        if not 2 <= length <= min(size - 8, MOST_HEADER_BYTES):
            raise ValueError(f"{file}: not a whole safetensors file: a header of {length} bytes in {size}")
        header = _decode(os.pread(fd, length, 8), dict[str, msgspec.Raw], file)
    entries = {n: _decode(bytes(raw), _Entry, file) for n, raw in header.items() if n != "__metadata__"}
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        start, end = entry.data_offsets
        if start != at or end < start or any(n < 0 for n in entry.shape):
            raise ValueError(f"{file}: not a whole safetensors file: {name} lies at {start} to {end}, not from {at} on")
        dtype = FILE_DTYPES.get(entry.dtype)
        if dtype is not None and end - start != math.prod(entry.shape) * dtype.itemsize:
            raise ValueError(f"{file}: {name} of {entry.dtype} {list(entry.shape)} has {end - start} bytes")
        at = end
    if 8 + length + at != size:
        raise ValueError(f"{file}: not a whole safetensors file: {size} bytes, its header tells {8 + length + at}")
    return {
        name: StoredTensor(file, name, entry.dtype, entry.shape, 8 + length + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def _decode(data: bytes, kind: type[T], file: Path) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not a whole file of its kind ({error})") from error
