"""A checkpoint written from whole tensors by one process, without a model: of states that another library saved.

It is of the ordinary format, as one rank would have saved it, and any layout reads it. One tensor is in memory at a
time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dzero.checkpoint.block_reader import BlockReader
from dzero.checkpoint.format import MANIFEST, VERSION, Manifest, StoredBox, index_name, seal
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.manifest_types import check_state
from dzero.checkpoint.new_folder import new_folder
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import CheckpointStore, Directory
from dzero.checkpoint.writer import ShardWriter
from dzero.models.tensor_views import Readable

BUFFERS = 4
IMPORTED = "imported"
"""Key in a checkpoint's `extra` of what another library saved beside its states; a run of dzero has none."""


@dataclass(frozen=True)
class WholeTensor:
    """A tensor to write in `dtype`; None stands for zeros of `shape`."""

    source: Readable | None
    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """Read it from where it is stored."""
        return torch.zeros(self.shape, dtype=self.dtype) if self.source is None else self.source().to(self.dtype)


def write_checkpoint(
    target: Path,
    step: int,
    tensors: Mapping[str, WholeTensor],
    state: dict[str, Any],
    progress: Callable[[int], None] = lambda count: None,
) -> Path:
    """Write a folder of checkpoints that holds one, and verify it; return the checkpoint.

    Args:
        target: The new folder, in one that exists. It gets its name when all of it is on disk.
        step: Step that the states belong to.
        tensors: Tensors by their names in a checkpoint (checkpoint/states.py).
        state: Values that are not tensors, as in a manifest.
        progress: Called with the bytes of each tensor that was written.

    Raises:
        CheckpointError: If `target` exists, or cannot be written. Nothing is left behind then.
    """
    parts = {name: StoredBox.unplaced(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    needed = sum(part.size_bytes for part in parts.values())
    with new_folder(target, needed, what="import") as folder:
        shelf = CheckpointStore(folder.path)
        name = shelf.begin(step)
        sealed = _written(shelf.partial(name), parts, tensors, progress)
        check_state(str(target), state)
        lineage = Lineage().resumed(0)
        manifest = Manifest(VERSION, step, (sealed,), state, *lineage, time.time_ns())
        with Directory(shelf.partial(name)) as inside:
            inside.write(MANIFEST, seal(manifest)[0])
        with Checkpoint(shelf.partial(name)):  # checks that the files fit each other
            shelf.publish(name)
        shelf.point(name, lineage)
    return target / name


def _written(
    path: Path,
    parts: Mapping[str, StoredBox],
    tensors: Mapping[str, WholeTensor],
    progress: Callable[[int], None],
) -> str:
    """Write the file of rank 0 and its index, read the file back, and return the seal of the index."""
    buffers = IOBuffers(BUFFERS)
    with Directory(path) as folder:
        with ShardWriter(folder, 0, parts, buffers) as writer:
            for name, tensor in tensors.items():
                writer.put(name, tensor.read())
                progress(parts[name].size_bytes)
            index = writer.finish()
        data, sealed = seal(index)
        folder.write(index_name(0), data)
        with BlockReader(folder, {0: index}, buffers) as files:
            for _ in files.verify(0):
                pass
    return sealed
