"""Handover of fp32 masters off the device from a dropped optimizer to the next one of the same model.

The masters stay in the memory and files of the dropped optimizer until another one is made, or the model is dropped.
Then they are copied, unit by unit, to where initial values are stored: host memory, or a file of their own for masters
on disk. The remains of the old optimizer are freed before the new one allocates memory.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Protocol

import torch

from dzero.hardware import give_back_freed_memory
from dzero.mesh import SHARD
from dzero.offload.manager import OffloadManager
from dzero.zero.init_on_disk import InitSpillFile
from dzero.zero.offloaded_param import HostStorage, TensorStorage
from dzero.zero.sharded import Sharded
from dzero.zero.unit import Unit


class HasMaster(Protocol):
    """Interface to the states of one parameter with a master."""

    name: str

    def values(self) -> torch.Tensor:
        """Return the working copy [elems], read from its storage."""

    def copy_master(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of the fp32 master [elems] with the edits in `values`; called where updates find the master."""


@dataclass
class OffloadedMasterStorage:
    """Storage (`zero.offloaded_param.TensorStorage`) of a master off the device, for the optimizer after this one."""

    states: HasMaster
    unit: str
    offload: OffloadManager

    def get(self) -> torch.Tensor:
        """Return a copy [elems]; raise OffloadError if it cannot be read."""
        found: list[torch.Tensor] = []
        values = self.states.values().cpu()
        self.offload.visit(self.unit, lambda: found.append(self.states.copy_master(values)), changes=False)
        return found[0]

    def put(self, flat: torch.Tensor) -> None:
        """Raise NotImplementedError: only the optimizer may write its master."""
        raise NotImplementedError("the master belongs to its optimizer")


def take_over(sharded: Sharded) -> None:
    """Copy the masters of a dropped optimizer out of its storage and free it, before a new one allocates memory.

    Nothing happens if that optimizer is still alive; the new one is refused then.

    Raises:
        OffloadError: A master cannot be read.
        DiskError: There is no space for masters on disk.
    """
    kept = [(unit, *each) for unit in sharded.units for each in unit.origin.items()]
    left = [(unit, name, storage) for unit, name, storage in kept if isinstance(storage, OffloadedMasterStorage)]
    if not left:
        return
    offload = left[0][2].offload
    offload.executor.drain()  # queued work refers to the optimizer that queued it
    gc.collect()  # a dropped optimizer and its scheduler form a reference cycle
    if any(unit.attached is not None for unit in sharded.units):
        return
    offload.come_to_rest()
    for unit in sharded.units:
        unit.wait_for_update()
    room = _room(sharded, [(unit, name) for unit, name, _ in left])
    del kept, offload
    while left:
        unit, name, storage = left.pop(0)
        unit.origin[name] = _copied(storage, name, room)
        del storage
    gc.collect()
    give_back_freed_memory()


def _copied(storage: TensorStorage, name: str, room: InitSpillFile | None) -> TensorStorage:
    master = storage.get()
    return HostStorage(master) if room is None else room.keep(name, master)


def _room(sharded: Sharded, left: list[tuple[Unit, str]]) -> InitSpillFile | None:
    """Return the file for masters whose tier is the disk, or None for the host."""
    layout = sharded.layout
    if layout.master.tier != "disk":
        return None
    shapes = {param.name: param for unit in sharded.shapes for param in unit.params}
    elems = sum(shapes[name].shard_elems(unit.layout.shard, layout.replica_shards) for unit, name in left)
    paths = layout.offload.disk.paths
    return InitSpillFile(paths[sharded.mesh.get_local_rank(SHARD) % len(paths)], elems * torch.float32.itemsize)
