"""The elements of a parameter that this rank has states for, and the placement and storage of these states."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dzero.mesh import REPLICATE, SHARD, host_mesh
from dzero.offload.manager import OffloadManager
from dzero.zero.dtensors import local_of, placed_like
from dzero.zero.offload_config import FROZEN
from dzero.zero.offloaded_param import OffDeviceShard, memory_of
from dzero.zero.replica_shards import mesh_of_replica_shards, span_of
from dzero.zero.rounding import to_working
from dzero.zero.sharded import Sharded
from dzero.zero.unit_shapes import ParamShape, rows_of


def read(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a plain tensor, read from their storage."""
    return tensor.read() if isinstance(tensor, OffDeviceShard) else tensor


def still_of(origin: torch.Tensor | None, local: torch.Tensor) -> bool:
    """Return whether `local` is `origin` rounded, i.e. the model was not given other values after shard()."""
    return origin is not None and torch.equal(
        to_working(origin, local.dtype).view(-1), local.to(origin.device).view(-1)
    )


def device_bytes(param: nn.Parameter) -> int:
    """Return the bytes of this rank's shard on the device, its whole storage; 0 for one off the device."""
    if (memory := memory_of(param)) is not None:
        return memory.flat.untyped_storage().nbytes() if memory.is_on_device else 0
    return local_of(param).untyped_storage().nbytes()


def params_device_bytes(params: Iterable[nn.Parameter]) -> dict[str, int]:
    """Return the bytes of this rank's shards on the device: "param", and "frozen" if any are."""
    totals = {"param": 0}
    for param in params:
        kind = "param" if param.requires_grad else FROZEN
        totals[kind] = totals.get(kind, 0) + device_bytes(param)
    return totals


def sharded_flat(local: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return a flat `local`, of equal length on every rank, as a DTensor [ranks, elems] with one row per rank.

    Its blocks follow the shards, so it is valid for this number of ranks only. With any other number the shape differs,
    and loading is an error instead of shifted elements.
    """
    return DTensor.from_local(local.view(1, -1), mesh, [Shard(0)] * mesh.ndim, run_check=False)


class StatePlacement:
    """Creates the states of a sharded model, in the memory of `offload` or on the device."""

    def __init__(self, sharded: Sharded, offload: OffloadManager) -> None:
        self.offload, self._buffer_layout = offload, offload.buffer_layout
        self._twins: dict[DeviceMesh, DeviceMesh] = {}
        layout, mesh = sharded.layout, sharded.mesh
        self._replica_mesh = mesh_of_replica_shards(mesh) if layout.replica_shards > 1 else None
        self._copy = mesh.get_local_rank(REPLICATE) if layout.replica_shards > 1 else 0, layout.replica_shards

    def span(self, shape: ParamShape, param: nn.Parameter, shards: int) -> tuple[int, slice]:
        """Return the elements of a parameter's flat shard, one of `shards`, that this rank has states for.

        Returns:
            Flat index of the first of these elements in the whole parameter, and their slice of the flat shard.
        """
        rank = param.device_mesh.get_local_rank(SHARD) if isinstance(param, DTensor) else 0
        shard = rank, shards
        first, _ = rows_of(shape.shape[0], shard, self._copy)
        return first * shape.row_elems, span_of(shape, shard, self._copy)

    def mesh(self, kind: str, name: str, param: nn.Parameter) -> DeviceMesh | None:
        """Return the host mesh of a parameter's "master" or "moments", else None; the first call is collective."""
        if not self._buffer_layout.on_host(kind, name):
            return None
        mesh = self._mesh(param)
        if mesh not in self._twins:
            self._twins[mesh] = host_mesh(mesh)
        return self._twins[mesh]

    def _mesh(self, param: nn.Parameter) -> DeviceMesh:
        assert isinstance(param, DTensor)
        return self._replica_mesh or param.device_mesh

    def placed(self, kind: str, local: torch.Tensor, name: str, param: nn.Parameter, *, by_row: bool) -> torch.Tensor:
        """Return this rank's flat part of a parameter's state as a DTensor, with one row per rank if `by_row`."""
        mesh = self.mesh(kind, name, param) or self._mesh(param)
        if by_row:
            return sharded_flat(local, mesh)
        return placed_like(local, param, mesh, None if self._replica_mesh is None else (Shard(0), Shard(0)))

    def blank(self, kind: str, name: str, key: str, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return memory for one state [like.numel()], whose values `ParamState.fill` sets."""
        if self._buffer_layout.on_host(kind, name):
            return self.offload.view(name, key, like.numel())
        return torch.zeros(like.numel(), dtype=dtype, device=like.device)

    def undo(self, name: str, key: str, like: torch.Tensor) -> torch.Tensor | None:
        """Return a state's place in the undo slot, of the length of `like`, or None if it has none."""
        key = f"undo {key}"
        return self.offload.view(name, key, like.numel()) if (name, key) in self._buffer_layout.at else None

    def shown(self, kind: str, name: str, view: torch.Tensor) -> torch.Tensor:
        """Return a state as state dicts show it: one on disk is read, and written back, on access."""
        if not self._buffer_layout.on_disk(kind, name):
            return view
        return OffDeviceShard.of(self.offload.on_disk(name, view), view.shape)
