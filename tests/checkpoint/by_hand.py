"""Checkpoints that tests write from tensors, without a model, an optimizer or a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dzero.checkpoint.format import MANIFEST, NAMES, VERSION, Manifest, StoredBox, index_name, seal
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.store import Directory
from dzero.checkpoint.writer import ShardWriter


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    ranks: int = 1,
    dims: Mapping[str, int] | None = None,
    extra: Mapping[str, Any] | None = None,
    block_bytes: int = 1 << 20,
) -> Path:
    """`folder`, a checkpoint of `ranks` ranks: each tensor cut into chunks along its dim in `dims`, or dim 0."""
    folder.mkdir(parents=True)
    blocks, seals = IOBuffers(2, block_bytes=block_bytes), []
    with Directory(folder) as opened:
        for rank in range(ranks):
            pieces = dict(_pieces(tensors, rank, ranks, dims or {}))
            parts = {name: part for name, (part, _) in pieces.items()}
            with ShardWriter(opened, rank, parts, blocks) as writer:
                for name, (_, piece) in pieces.items():
                    writer.put(name, piece)
                data, sealed = seal(writer.finish())
            opened.write(index_name(rank), data)
            seals.append(sealed)
        state = {"optim": {}, "extra": dict(extra or {})}
        opened.write(MANIFEST, seal(Manifest(VERSION, 7, tuple(seals), state))[0])
    return folder


def _pieces(
    tensors: Mapping[str, Tensor], rank: int, ranks: int, dims: Mapping[str, int]
) -> Sequence[tuple[str, tuple[StoredBox, Tensor]]]:
    found = []
    for name, tensor in tensors.items():
        dim, shape = dims.get(name, 0), tuple(tensor.shape)
        step = -(-shape[dim] // ranks)
        first = min(rank * step, shape[dim])
        piece = tensor.narrow(dim, first, min(step, shape[dim] - first))
        offset = [0] * len(shape)
        offset[dim] = first
        part = StoredBox(name, NAMES[tensor.dtype], shape, tuple(offset), tuple(piece.shape), 0, 0)
        found.append((name, (part, piece)))
    return found
