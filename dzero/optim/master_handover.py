"""Masters off the device that outlive their optimizer: the next one begins with them, as with those on the device.

They stay where they are, in the memory and files of the optimizer that is gone, until another one is made for the
model, or the model goes too. Then they are copied out, unit by unit, to where first values wait (host memory; a file of
their own for those on disk), and what is left of the old optimizer is freed before the new one takes memory.
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
from dzero.zero.shard import Sharded
from dzero.zero.unit import Unit


class HasMaster(Protocol):
    """The states of one parameter."""

    name: str

    def values(self) -> torch.Tensor:
        """Return the working copy [elems], read from where it lives."""

    def copy_master(self, values: torch.Tensor) -> torch.Tensor:
        """Return a copy of the fp32 master [elems], with what was edited in `values`; called where updates find it."""


@dataclass
class OffloadedMasterStorage:
    """The home (`hosted.Home`) of a master that lives off the device, for the optimizer that comes after this one."""

    states: HasMaster
    unit: str
    offload: OffloadManager

    def get(self) -> torch.Tensor:
        """Return a copy [elems]. Raises OffloadError where it cannot be read."""
        found: list[torch.Tensor] = []
        values = self.states.values().cpu()
        self.offload.visit(self.unit, lambda: found.append(self.states.copy_master(values)), changes=False)
        return found[0]

    def put(self, flat: torch.Tensor) -> None:
        """Take other values."""
        raise NotImplementedError("the master belongs to its optimizer")


def take_over(sharded: Sharded) -> None:
    """Copy out what a dropped optimizer kept off the device, and free the rest; called before a new one takes memory.

    Nothing happens while that optimizer is alive: the new one is refused then.

    Raises:
        OffloadError: For masters that cannot be read.
        DiskError: Where those on disk find no space.
    """
    kept = [(unit, *each) for unit in sharded.units for each in unit.origin.items()]
    left = [(unit, name, home) for unit, name, home in kept if isinstance(home, OffloadedMasterStorage)]
    if not left:
        return
    offload = left[0][2].offload
    offload.executor.drain()  # queued work holds the optimizer that queued it
    gc.collect()  # a dropped optimizer and its scheduler refer to each other
    if any(unit.attached is not None for unit in sharded.units):
        return
    offload.come_to_rest()
    for unit in sharded.units:
        unit.arrive()
    room = _room(sharded, [(unit, name) for unit, name, _ in left])
    del kept, offload
    while left:
        unit, name, home = left.pop(0)
        unit.origin[name] = _copied(home, name, room)
        del home
    gc.collect()
    give_back_freed_memory()


def _copied(home: TensorStorage, name: str, room: InitSpillFile | None) -> TensorStorage:
    master = home.get()
    return HostStorage(master) if room is None else room.keep(name, master)


def _room(sharded: Sharded, left: list[tuple[Unit, str]]) -> InitSpillFile | None:
    """Return the file for masters whose tier is the disk; None for those of the host."""
    layout = sharded.layout
    if layout.master.tier != "disk":
        return None
    shapes = {param.name: param for unit in sharded.shapes for param in unit.params}
    elems = sum(shapes[name].shard_elems(unit.layout.shard, layout.shares) for unit, name in left)
    paths = layout.offload.disk.paths
    return InitSpillFile(paths[sharded.mesh.get_local_rank(SHARD) % len(paths)], elems * torch.float32.itemsize)
