"""An open checkpoint: its contents, and any box of its tensors, whichever ranks wrote it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from dzero.checkpoint.block_reader import BlockReader, Want
from dzero.checkpoint.box import Box, is_contiguous
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import (
    DTYPES,
    MANIFEST,
    MOST_INDEX_BYTES,
    FileIndex,
    StoredBox,
    check_together,
    index_name,
    unseal,
)
from dzero.checkpoint.store import Directory, read_manifest
from dzero.offload.memory_pool import aligned
from dzero.utils.torch_internals import without_wrappers

COLUMNS_BYTES = 64 << 20
"""Bytes of whole rows that are read at a time when only some of their columns are wanted."""


class Checkpoint:
    """An open checkpoint, whose files are validated before their contents are used; raises `CheckpointError`.

    With `check_files`, all ranks' files must exist with the right size at once, not only when they are read.
    """

    def __init__(self, path: Path | str, *, check_files: bool = True) -> None:
        self.path = Path(path)
        with ExitStack() as undo:
            self._folder = undo.enter_context(Directory(self.path))
            self.manifest = read_manifest(self._folder)
            self.indexes = [self._index(rank, sealed) for rank, sealed in enumerate(self.manifest.seals)]
            self._checked(MANIFEST, lambda: check_together(self.indexes))
            self.files = undo.enter_context(BlockReader(self._folder, dict(enumerate(self.indexes))))
            for rank in range(self.manifest.ranks if check_files else 0):
                self.files.check_size(rank)
            self._undo = undo.pop_all()
        self._where: dict[str, list[tuple[int, str, StoredBox]]] = {}
        for index in self.indexes:
            for entry, part in index.parts.items():
                if part.of is not None:
                    name = without_wrappers(part.of)  # older checkpoints have names of wrapped modules
                    self._where.setdefault(name, []).append((index.rank, entry, part))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    @property
    def names(self) -> Collection[str]:
        """Names of the tensors that ranks share."""
        return self._where.keys()

    def moments(self, param: str) -> list[str]:
        """Return the keys of a parameter's optimizer states except the master; an 8-bit moment has one key."""
        kinds = {kind for kind, _, of in (name.partition(".") for name in self.names) if of == param}
        return sorted({kind.removesuffix("_codes") for kind in kinds} - {"master", "param"})

    def check_shape(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `CheckpointError` if the tensor `name` has another shape."""
        if self.part(name).shape != shape:
            saved = list(self.part(name).shape)
            raise CheckpointError(
                str(self.path), f"{name} is {saved}, this model's {list(shape)}: it was saved from another model"
            )

    def part(self, name: str) -> StoredBox:
        """Return any part of a tensor, as all agree in dtype and shape; raise `CheckpointError` if there is none."""
        return self.parts(name)[0][2]

    def parts(self, name: str) -> list[tuple[int, str, StoredBox]]:
        """Return (rank, entry, stored box) for every box of a tensor that ranks wrote, or raise as `part` does."""
        if name not in self._where:
            raise CheckpointError(str(self.path), f"it holds no {name}: it was saved from another model or optimizer")
        return self._where[name]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Read a box of a tensor, in its stored dtype, to the CPU."""
        return self.read_all([(name, box)])[0]

    def bytes_of(self, boxes: Iterable[tuple[str, Box]]) -> int:
        """Return the bytes of `room` that `read_all` needs for `boxes`."""
        return sum(aligned(box.elems * DTYPES[self.part(name).dtype].itemsize) for name, box in boxes)

    def read_all(self, boxes: Sequence[tuple[str, Box]], room: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Read several boxes; a block of a file that holds parts of several boxes is read once.

        The results are views of the uint8 buffer `room`, if given.
        """
        found = []
        for name, box in boxes:
            dtype = DTYPES[self.part(name).dtype]
            if room is None:
                found.append(torch.empty(box.size, dtype=dtype))
            else:
                count = box.elems * dtype.itemsize
                found.append(room[:count].view(dtype).view(box.size))
                room = room[aligned(count) :]
        wanted: dict[int, list[Want]] = {}
        for (name, box), out in zip(boxes, found, strict=True):
            self._check_box(name, box)
            for rank, _, part in self._where[name]:
                if (common := part.box.common(box)) is None:
                    continue
                if is_contiguous(common, part.box) and is_contiguous(common, box):
                    first, last = common.span(box)
                    data = _bytes(out.view(-1)[first:last])
                    wanted.setdefault(rank, []).append((_start(part, common), data))
                else:
                    self._read_columns(rank, part, common, out[common.slices(box)])
        self.files.read(wanted)
        return found

    def read_entries(self, rank: int, entries: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read whole entries of a rank's file; raise `CheckpointError` if one does not exist."""
        parts, found = self.indexes[rank].parts, dict[str, torch.Tensor]()
        for name in entries:
            if name not in parts:
                raise CheckpointError(str(self.path / index_name(rank)), f"it holds no {name}")
            found[name] = torch.empty(parts[name].size, dtype=DTYPES[parts[name].dtype])
        self.files.read({rank: [(parts[name].start, _bytes(out)) for name, out in found.items()]})
        return found

    def verify(self) -> Iterator[int]:
        """Verify all files, and yield the bytes of each block; raise `CheckpointError` for damage."""
        for index in self.indexes:
            yield from self.files.verify(index.rank)

    def _read_columns(self, rank: int, part: StoredBox, common: Box, out: torch.Tensor) -> None:
        """Read a box that is not contiguous in `part`, through the whole rows that hold it, some at a time."""
        row_bytes = math.prod(part.size[1:]) * DTYPES[part.dtype].itemsize
        most_rows = max(1, COLUMNS_BYTES // row_bytes)
        for first in range(0, common.size[0], most_rows):
            rows = common.narrow(first, min(most_rows, common.size[0] - first))
            wide = Box((rows.offset[0], *part.offset[1:]), (rows.size[0], *part.size[1:]))
            found = torch.empty(wide.size, dtype=DTYPES[part.dtype])
            self.files.read({rank: [(_start(part, wide), _bytes(found))]})
            out[first : first + rows.size[0]] = found[rows.slices(wide)]

    def _index(self, rank: int, sealed: str) -> FileIndex:
        name = index_name(rank)
        index = unseal(self._folder.read(name, MOST_INDEX_BYTES), FileIndex, str(self.path / name), sealed)
        self._checked(name, lambda: index.check(rank))
        return index

    def _check_box(self, name: str, box: Box) -> None:
        shape = self.part(name).shape
        if len(shape) != len(box.size) or Box.whole(shape).common(box) not in (box, None):
            raise CheckpointError(str(self.path), f"{name} is {list(shape)}; {box} is not within it")

    def _checked(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except ValueError as error:
            raise CheckpointError(str(self.path / name), str(error)) from error


def _start(part: StoredBox, box: Box) -> int:
    """Return the offset in the file's data section of `box`, which is contiguous in `part`."""
    return part.start + box.span(part.box)[0] * DTYPES[part.dtype].itemsize


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
