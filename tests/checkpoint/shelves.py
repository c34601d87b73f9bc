"""Checkpoints for tests: what ranks would write, by the writer itself, in one process and without a group."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from dzero.checkpoint.box import Box
from dzero.checkpoint.format import DTYPES, MANIFEST, NAMES, VERSION, FileIndex, Manifest, StoredBox, index_name, seal
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.store import CheckpointStore, Directory
from dzero.checkpoint.writer import ShardWriter

PAGE = 4096
Entries = Mapping[str, tuple[StoredBox, Tensor]]
"""What a rank puts, by entry."""


def entry(of: str | None, whole: Tensor, box: Box | None = None) -> tuple[StoredBox, Tensor]:
    """The box of `whole` as a part of the tensor `of`."""
    shape = tuple(whole.shape)
    box = box or Box.whole(shape)
    return StoredBox(of, NAMES[whole.dtype], shape, box.offset, box.size, 0, 0), whole[box.slices(Box.whole(shape))]


def write_rank(folder: Directory, rank: int, entries: Entries, *, block_bytes: int = PAGE) -> FileIndex:
    parts = {name: part for name, (part, _) in entries.items()}
    with ShardWriter(folder, rank, parts, IOBuffers(2, block_bytes=block_bytes)) as writer:
        for name, (_, tensor) in entries.items():
            writer.put(name, tensor)
        return writer.finish()


RUN = Lineage("0" * 32)


def write(
    shelf: Path,
    step: int,
    ranks: Sequence[Entries],
    *,
    block_bytes: int = PAGE,
    lineage: Lineage = RUN,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """A checkpoint that the pointer names."""
    shelf.mkdir(exist_ok=True)
    on = CheckpointStore(shelf)
    name, seals = on.begin(step), []
    with Directory(on.partial(name)) as folder:
        for rank, entries in enumerate(ranks):
            data, sealed = seal(write_rank(folder, rank, entries, block_bytes=block_bytes))
            folder.write(index_name(rank), data)
            seals.append(sealed)
        manifest = Manifest(VERSION, step, tuple(seals), {"extra": {"step": step, **extra}}, *lineage, time.time_ns())
        folder.write(MANIFEST, seal(manifest)[0])
    on.publish(name)
    on.point(name, lineage)
    return shelf / name


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits, NaNs and denormal numbers among them."""
    count, generator = Box.whole(shape).elems, torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    found = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return found.view(dtype).view(shape)


def raw(tensor: Tensor) -> bytes:
    """Bits: a NaN is itself."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def cut(draw: random.Random, box: Box, times: int) -> list[Box]:
    """Boxes that make up `box`, cut along any dim, some of them empty."""
    boxes = [box]
    for _ in range(times if box.size else 0):
        each = boxes.pop(draw.randrange(len(boxes)))
        dim, at = draw.randrange(len(each.size)), 0
        at = draw.randint(0, each.size[dim])
        for first, count in ((0, at), (at, each.size[dim] - at)):
            offset, size = list(each.offset), list(each.size)
            offset[dim], size[dim] = offset[dim] + first, count
            boxes.append(Box(tuple(offset), tuple(size)))
    return boxes


def scattered(draw: random.Random, tensors: Mapping[str, Tensor], ranks: int) -> list[Entries]:
    """All of `tensors`, each cut into boxes that lie with any rank, in any order."""
    every = [(name, box) for name, t in tensors.items() for box in cut(draw, Box.whole(tuple(t.shape)), 5)]
    draw.shuffle(every)
    found: list[dict[str, tuple[StoredBox, Tensor]]] = [{} for _ in range(ranks)]
    for number, (name, box) in enumerate(every):
        found[draw.randrange(ranks)][f"{name}/{number}"] = entry(name, tensors[name], box)
    return found


def mixed() -> dict[str, Tensor]:
    """Every dtype; scalars, tensors of nothing, smaller and larger than a block of a page."""
    shapes = [
        (),
        (0,),
        (1,),
        (3, 0, 2),
        (7,),
        (5, 3),
        (4, 3, 5),
        (2, 3, 2, 4),
        (1100,),
        (130, 61),
        (3, 4099),
        (2000, 3),
    ]
    dtypes = [*DTYPES.values()]
    return {f"t{n}": bits(dtypes[n % len(dtypes)], shape, n) for n, shape in enumerate(shapes)}
