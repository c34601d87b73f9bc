"""Axis names and degrees -> DeviceMesh.

    axis       ranks along it                                   stage 0   stages 1-3   hybrid (HSDP)
    replicate  hold copies of the same shards                      N          1          outside
    shard      hold 1/shard of every sharded state                 1          N          inside
    tp         hold 1/tp of every matrix, and of every sequence between blocks

The first two are the data-parallel ranks, N = replicate x shard: each sees samples of its own, and every placement in
the table (`zero/layout.py`) is a pair over them. Ranks of the third see the same samples.

Neighbouring ranks lie on the last axis, and groups of them on the one before it: with tp, or shard x tp, the ranks of a
node, the heaviest traffic stays inside it.
"""

from __future__ import annotations

import math
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

REPLICATE, SHARD, TENSOR = "replicate", "shard", "tp"
AXES = (REPLICATE, SHARD)
"""Of the data-parallel ranks."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of the axes; dp x tp is the number of ranks.

    `dp`: data-parallel ranks; None for all that are left. `replicate`: copies of the sharded model (hybrid sharding);
    1 = shard over all data-parallel ranks. Stage 0 replicates over all of them by itself, so it takes no degree.
    `tp`: ranks that share every matrix (tensor and sequence parallelism).
    """

    dp: int | None = None
    replicate: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for key in ("dp", "replicate", "tp"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"mesh.{key}={value}: must be a whole number ≥ 1")

    @property
    def ranks(self) -> int | None:
        """How many the degrees make; None where dp is what is left."""
        return None if self.dp is None else self.dp * self.tp

    def data_ranks(self, world: int) -> int:
        """Of `world` ranks. Raises ValueError where the degrees do not make them."""
        if world % self.tp == 0 and self.dp in (None, world // self.tp):
            return world // self.tp
        given = f"mesh.dp={self.dp} x mesh.tp={self.tp}" if self.dp else f"mesh.tp={self.tp}"
        makes = "make as many" if self.dp else "divides them"
        start = f", or start {self.ranks} (without torchrun launch.workers={self.ranks})" if self.ranks else ""
        raise ValueError(f"{given}, but there are {world} ranks: (dp, tp) that {makes}: {_factorings(world)}{start}")

    def degrees(self, ranks: int, *, stage: int) -> tuple[int, int]:
        """(replicate, shard) for `ranks` data-parallel ranks. Raises ValueError when they do not divide."""
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


def make_mesh(device_type: str, *, replicate: int = 1, shard: int | None = None, tp: int = 1) -> DeviceMesh:
    """The (replicate, shard) mesh over all ranks of the default group, or with tp > 1 the (replicate, shard, tp) one;
    `shard=None` takes the remaining ranks.

    Raises ValueError when the degrees do not multiply to the world size.
    """
    world = dist.get_world_size()
    degree = world // (replicate * tp) if shard is None else shard
    degrees = {REPLICATE: replicate, SHARD: degree} | ({TENSOR: tp} if tp > 1 else {})
    if math.prod(degrees.values()) != world:
        given = " * ".join(f"{axis}={each}" for axis, each in degrees.items())
        allowed = [each for each in _factorings(world, len(degrees)) if tp in (1, each[-1])] or _factorings(world, 3)
        raise ValueError(f"{given} is not the world size {world}; ({', '.join(degrees)}) may be one of {allowed}")
    mesh = init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
    if dist.get_backend() != "fake":
        for axis in degrees:  # torch gives the groups that it makes 10 or 30 minutes, whatever the default group has
            _set_pg_timeout(timeout_of_ranks(), mesh.get_group(axis))
    return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The (replicate, shard) part of `mesh` that this rank is in. Raises ValueError where it has no such axes."""
    names = mesh.mesh_dim_names or ()
    if names[: len(AXES)] != AXES:
        raise ValueError(f"mesh axes {names}: expected {AXES}, as dzero.make_mesh builds them")
    return mesh if names == AXES else mesh[AXES]


def data_rank_of(mesh: DeviceMesh) -> int:
    """This rank among the data-parallel ones, those that see the same samples being one."""
    copy, own = (mesh.get_local_rank(axis) for axis in AXES)
    return copy * mesh[SHARD].size() + own


def model_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """This rank's groups along the axes that are not data-parallel."""
    return {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or () if axis not in AXES}


def _factorings(number: int, factors: int = 2) -> list[tuple[int, ...]]:
    """All ordered products of so many whole numbers that make `number`."""
    if factors == 1:
        return [(number,)]
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return [(each, *rest) for each in divisors for rest in _factorings(number // each, factors - 1)]


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
