"""Values on disk for a time: parameters and fp32 origins from `shard` until an optimizer takes them, and parked states.

Each rank has one unnamed file. It is closed with the last tensor in it, and the kernel removes it when the process
ends. All its space is reserved before the first tensor is written, and reads are verified as on the disk tier.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from dzero.hardware import format_bytes
from dzero.utils.scratch_paths import DiskError, make_folder, open_path, reported_as_disk_error
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape
from dzero.zero.units import ParamSlot


class InitSpillFile:
    """Unnamed file of reserved size for values that are read back once.

    Args:
        path: Directory of the file.
        needed_bytes: Size to reserve.
        what: What the values are, for messages.

    Raises:
        DiskError: If `path` is not a directory, or has too little space.
    """

    def __init__(self, path: str, needed_bytes: int, what: str = "first values") -> None:
        os.close(open_path(path))
        self.path, self.what, self._end = os.path.abspath(path), what, 0
        with reported_as_disk_error(self.path, f"{format_bytes(needed_bytes)} of scratch space for {what}"):
            file = tempfile.TemporaryFile(dir=self.path)  # noqa: SIM115 (closed with this object)
            weakref.finalize(self, file.close)
            self.fd = file.fileno()
            if needed_bytes:
                os.posix_fallocate(self.fd, 0, needed_bytes)

    @classmethod
    def of(
        cls,
        layout: Layout,
        slots: Mapping[str, Sequence[ParamSlot]],
        shapes: Mapping[str, UnitShape],
        off_device: Mapping[str, frozenset[str]],
        *,
        rank: int,
    ) -> InitSpillFile | None:
        """Return a file for the values of `slots` on disk, or None if there are none; every rank checks all paths."""
        paths = layout.offload.disk.paths
        on_disk = {kind for kind, (tier, _) in layout.tiers.items() if tier == "disk"}
        for path in paths if on_disk or layout.offload.activations == "disk" else ():
            make_folder(path)
        if not on_disk & {"param", "frozen", "master"}:
            return None
        needed, working = 0, layout.param.dtype
        for unit, slot, param in ((u, *each) for u in slots for each in zip(slots[u], shapes[u].params, strict=True)):
            shard = layout.of_unit(shapes[unit]).shard
            kind = "param" if param.trainable else "frozen"
            if kind in on_disk and slot.name in off_device[kind]:
                needed += param.shard_bytes(shard, working.itemsize)
            if "master" in on_disk and slot.name in off_device["master"] and slot.param.dtype != working:
                needed += param.shard_elems(shard, layout.replica_shards) * torch.float32.itemsize
        return cls(paths[rank % len(paths)], needed)

    def keep(self, name: str, tensor: torch.Tensor) -> SpilledTensor:
        """Write `tensor` and return its storage, which keeps the file open."""
        spilled = SpilledTensor(self, name, self._end, tensor.shape, tensor.dtype)
        self._end += tensor.nbytes
        spilled.put(tensor)
        return spilled


@dataclass
class SpilledTensor:
    """`TensorStorage` (offloaded_param.py) of a tensor in an `InitSpillFile`."""

    room: InitSpillFile
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype
    digest: int = 0

    def get(self) -> torch.Tensor:
        """Return a copy of the values; raise DiskError, with errno EBADMSG if they are not what was written."""
        found = torch.empty(self.shape, dtype=self.dtype)
        data = _bytes(found)
        done = 0
        with reported_as_disk_error(self.room.path, f"reading the {self.room.what} of {self.name}"):
            while done < len(data):
                moved = os.preadv(self.room.fd, [data[done:]], self.offset + done)
                if not moved:
                    raise OSError(errno.EIO, "the file was cut short")
                done += moved
        if xxhash.xxh3_64_intdigest(data) != self.digest:
            what = f"the {self.room.what} of {self.name} are not what was written: the disk or its cable is failing"
            raise DiskError(errno.EBADMSG, self.room.path, what, piece=self.name, offset=self.offset, count=len(data))
        return found

    def put(self, flat: torch.Tensor) -> None:
        """Write the values, and keep their checksum in memory."""
        data, done = _bytes(flat.detach().cpu().contiguous()), 0
        with reported_as_disk_error(self.room.path, f"writing the {self.room.what} of {self.name}"):
            while done < len(data):
                done += os.pwritev(self.room.fd, [data[done:]], self.offset + done)
        self.digest = xxhash.xxh3_64_intdigest(data)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
