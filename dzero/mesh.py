"""Axis names and degrees -> DeviceMesh.

The data-parallel ranks form a two-axis mesh; every placement in the table (`zero/layout.py`) is a pair over it:

    axis       ranks along it                                   stage 0   stages 1-3   hybrid (HSDP)
    replicate  hold copies of the same shards                      N          1          outside
    shard      hold 1/shard of every sharded state                 1          N          inside

Neighbouring ranks lie on the shard axis, so with `shard = ranks per node` the heavy traffic stays inside a node.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from dzero.meeting import meet

REPLICATE, SHARD = "replicate", "shard"
AXES = (REPLICATE, SHARD)


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of the data-parallel axes; their product is the number of ranks.

    `dp`: data-parallel ranks; None for all that there are. `replicate`: copies of the sharded model (hybrid sharding);
    1 = shard over all ranks. Stage 0 replicates over all ranks by itself, so it takes no degree.
    """

    dp: int | None = None
    replicate: int = 1

    def __post_init__(self) -> None:
        for key in ("dp", "replicate"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"mesh.{key}={value}: must be a whole number ≥ 1")

    def degrees(self, ranks: int, *, stage: int) -> tuple[int, int]:
        """(replicate, shard) for `ranks` data-parallel ranks. Raises ValueError when they do not divide."""
        if self.dp not in (None, ranks):
            raise ValueError(
                f"mesh.dp={self.dp}, but there are {ranks} ranks: start as many (without torchrun "
                f"launch.workers={self.dp}), or leave mesh.dp away"
            )
        if stage == 0:
            if self.replicate != 1:
                raise ValueError(
                    f"mesh.replicate={self.replicate} has no effect at zero.stage=0, which replicates over all "
                    f"{ranks} ranks; remove it, or take zero.stage=1, 2 or 3"
                )
            return ranks, 1
        if ranks % self.replicate:
            allowed = [d for d in range(1, ranks + 1) if ranks % d == 0]
            raise ValueError(f"mesh.replicate={self.replicate} does not divide the {ranks} ranks; allowed: {allowed}")
        return self.replicate, ranks // self.replicate


def local_rank() -> int:
    """This process among those of its host, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    """Processes of this host, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta) -> Iterator[None]:
    """Join the group that the environment (torchrun's variables) describes; always leave it again.

    CPU tensors travel over gloo, CUDA tensors over nccl, in one group.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, ranks = meet("group", timeout)
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=device_id)
    try:
        yield
    finally:
        dist.destroy_process_group()


def make_mesh(device_type: str, *, replicate: int = 1, shard: int | None = None) -> DeviceMesh:
    """The (replicate, shard) mesh over all ranks of the default group; `shard=None` takes the remaining ranks.

    Raises ValueError when replicate * shard is not the world size.
    """
    world = dist.get_world_size()
    degree = world // replicate if shard is None else shard
    if replicate * degree != world:
        factorings = [(d, world // d) for d in range(1, world + 1) if world % d == 0]
        raise ValueError(
            f"replicate={replicate} * shard={degree} is not the world size {world}; "
            f"(replicate, shard) may be one of {factorings}"
        )
    mesh = init_device_mesh(device_type, (replicate, degree), mesh_dim_names=AXES)
    if dist.get_backend() != "fake":
        for axis in AXES:  # torch gives the groups that it makes 10 or 30 minutes, whatever the default group has
            _set_pg_timeout(timeout_of_ranks(), mesh.get_group(axis))
    return mesh


def timeout_of_ranks() -> timedelta:
    """Of the collectives of all ranks, as the process group was made; not of a fake one, which waits for nobody."""
    group = dist.group.WORLD
    assert group is not None
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks for tensors in host memory: `mesh` itself on a CPU machine, else its twin over gloo.

    Raises RuntimeError where the process group moves no CPU tensors.
    """
    if mesh.device_type == "cpu":
        return mesh
    if "cpu" not in dist.get_backend_config():
        raise RuntimeError(
            f"the process group is {dist.get_backend_config()}: states in host memory need one that moves CPU tensors "
            'too, e.g. init_process_group("cpu:gloo,cuda:nccl")'
        )
    return DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
