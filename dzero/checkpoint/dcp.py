"""Storage reader that loads dzero checkpoints with `torch.distributed.checkpoint`.

    dcp.load(model.state_dict(), storage_reader=DcpReader("checkpoints/step_00000200"))
    dcp.load({"master": masters, "exp_avg": moments}, storage_reader=DcpReader("checkpoints"))

Programs that do not train with dzero can load its checkpoints this way. torch plans which boxes its DTensors need, on
any mesh and with any placements; the reader verifies each block before it uses it. Neither metadata nor data are
pickled, so only tensors are offered, and step counts and settings are not.

    key in the state dict                          value
    <parameter>, <buffer>                          the master; a tensor without a master as it was saved
    master.<parameter>, exp_avg.<parameter>, …     every tensor by its stored name (checkpoint/states.py)

A tied parameter is offered only under the first of its names. To load a state dict that contains its other names too,
pass `planner=DefaultLoadPlanner(allow_partial_load=True)`.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dzero.checkpoint.box import Box
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import DTYPES, MANIFEST
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.states import values_of
from dzero.checkpoint.store import checkpoint_at
from dzero.zero.rounding import to_working


class DcpReader(StorageReader):
    """Storage reader of the checkpoint at `path`, or of the latest checkpoint in that folder.

    One reader may load any number of state dicts. Values are rounded to the target's dtype as in training. Errors are
    `CheckpointError`, which torch wraps in its own error when several ranks load together.
    """

    def __init__(self, path: Path | str) -> None:
        self._take(path)

    def _take(self, path: Path | str) -> None:
        self.path = checkpoint_at(path)
        with Checkpoint(self.path) as checkpoint:
            self._names = {name: name for name in checkpoint.names}
            for own, stored in values_of(checkpoint).items():
                if own in self._names:
                    raise CheckpointError(str(self.path), f"{own} is both a parameter and the state {own}: rename it")
                self._names[own] = stored
            shown = {key: _shown(checkpoint, name) for key, name in self._names.items()}
        self._metadata = Metadata(shown)  # type: ignore[arg-type]  # dict is invariant

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to the checkpoint at `checkpoint_id`, if given; called by torch."""
        if checkpoint_id is not None:
            self._take(Path(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """Return all tensors and the boxes of them that ranks saved; called by torch."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing; called by torch."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return `plan` unchanged; called by torch."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return `plans` unchanged; called by torch."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the tensors that torch planned for this rank; called by torch."""
        with Checkpoint(self.path) as checkpoint:
            for item in plan.items:
                self._fill(checkpoint, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` is the folder of a checkpoint."""
        return (Path(checkpoint_id) / MANIFEST).is_file()

    def _fill(self, checkpoint: Checkpoint, item: ReadItem, planner: LoadPlanner) -> None:
        name, start = item.storage_index.fqn, item.storage_index.offset
        if item.type is not LoadItemType.TENSOR or start is None:
            raise CheckpointError(str(self.path), f"{name}: only tensors are read, nothing that is pickled")
        box = Box(tuple(map(sum, zip(start, item.storage_offsets, strict=True))), tuple(item.lengths))
        values, target = checkpoint.read(self._names[name], box), planner.resolve_tensor(item).detach()
        if values.dtype != target.dtype:
            if not (values.is_floating_point() and target.is_floating_point()):
                raise CheckpointError(str(self.path), f"{name} is {values.dtype}: it cannot become {target.dtype}")
            values = to_working(values.float(), target.dtype)
        target.copy_(values)
        planner.commit_tensor(item, target)


def _shown(checkpoint: Checkpoint, name: str) -> TensorStorageMetadata:
    """Describe a tensor and its boxes with torch's metadata types."""
    part, boxes = checkpoint.part(name), [each.box for _, _, each in checkpoint.parts(name)]
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in boxes]
    return TensorStorageMetadata(TensorProperties(DTYPES[part.dtype]), torch.Size(part.shape), chunks)
