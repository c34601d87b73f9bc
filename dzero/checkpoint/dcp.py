"""PyTorch's own loader over our checkpoints, so that programs without dzero read them too.

    dcp.load(model.state_dict(), storage_reader=Reader("checkpoints/step_00000200"))
    dcp.load({"master": masters, "exp_avg": moments}, storage_reader=Reader("checkpoints"))

torch plans which boxes its DTensors need, on whatever mesh and placements; here they are read, each block verified
first. Nothing is pickled, in metadata or data, so what is no tensor (steps, settings) is not offered.

    key in the state dict                          value
    <parameter>, <buffer>                          the master; what has none is as it was saved
    master.<parameter>, exp_avg.<parameter>, …     every tensor by its own name (states.py)

A tied parameter is offered under the first of its names; a state dict that has others as well is loaded with
`planner=DefaultLoadPlanner(allow_partial_load=True)`.
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
    """Of the checkpoint at `path`, or the latest in that folder. One reader may load any number of state dicts.

    Values become the target's dtype as training rounds them. Raises CheckpointError, which torch's loader wraps into
    its own error once ranks load together.
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
        """Called by torch: another checkpoint, or the same again."""
        if checkpoint_id is not None:
            self._take(Path(checkpoint_id))

    def read_metadata(self) -> Metadata:
        """Called by torch: all tensors, and the boxes that ranks saved of them."""
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Called by torch: nothing to do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Called by torch: as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called by torch: as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Called by torch: fill what it planned for this rank."""
        with Checkpoint(self.path) as checkpoint:
            for item in plan.items:
                self._fill(checkpoint, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a checkpoint's folder."""
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
    """A tensor, and the boxes of it, as torch describes them."""
    part = checkpoint.part(name)
    chunks = [ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)) for box in checkpoint.boxes(name)]
    return TensorStorageMetadata(TensorProperties(DTYPES[part.dtype]), torch.Size(part.shape), chunks)
