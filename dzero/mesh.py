"""Axis names and degrees -> DeviceMesh.

    axis       ranks along it                                   stage 0   stages 1-3   hybrid (HSDP)
    replicate  hold copies of the same shards                      N          1          outside
    shard      hold 1/shard of every sharded state                 1          N          inside
    tp         hold 1/tp of every matrix, and of every sequence between blocks
    pp         hold some of the layers

The first two are the data-parallel ranks, N = replicate x shard = dp x cp: each sees tokens of its own, and every
placement in the table (`zero/layout.py`) is a pair over them. Ranks of the others see the same tokens.

cp is no axis of the mesh but a group of its own: cp data-parallel neighbours share their sequences, and each sees a
part of every one (parallel/context/parallelize.py). ZeRO takes no notice of it, only what reads sequences does.

Nor is ep an axis of that mesh: ep neighbours share the experts of a mixture, each has 1/ep of them whole, and states of
experts are placed over the others, by a mesh of their own (`expert_mesh`), which with pp is that of the ranks with the
same layers. Neighbours are data-parallel ranks, and with tp those first, whose tokens between blocks are their own:

    replicate x shard x ep    where shard = shard of all * tp / ep, or at stage 0 replicate = replicate of all * tp / ep

Neighbouring ranks lie on the last axis, and groups of them on the one before it: (pp, replicate, shard, tp). With tp,
or shard x tp, the ranks of a node, the heaviest traffic stays inside it; the lightest, of pp, goes farthest.
"""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from dzero.errors import RunError
from dzero.mesh_config import factorings
from dzero.rendezvous import rendezvous
from dzero.utils.ranges import divisors

REPLICATE, SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE = "replicate", "shard", "tp", "cp", "ep", "pp"
AXES = (REPLICATE, SHARD)
"""Of the data-parallel ranks."""


def local_rank() -> int:
    """This process among those of its host, as torchrun says."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_ranks() -> int:
    """Processes of this host, as torchrun says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


LATER = timedelta(seconds=30)


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta) -> Iterator[None]:
    """Join the group that the environment (torchrun's variables) describes; always leave it again.

    CPU tensors travel over gloo, CUDA tensors over nccl, in one group. nccl gets `LATER` besides: it would end the
    process before the ranks have told where they are (launch/watchdog.py).
    """
    check_interfaces()
    timeout += LATER if device.type == "cuda" else timedelta()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, ranks = rendezvous("group", timeout)
    device_id = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout, device_id=device_id)
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_interfaces() -> None:
    """Raises RunError where GLOO_SOCKET_IFNAME, as gloo reads it, names a network interface that does not exist."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    has = [name for _, name in socket.if_nameindex()]
    if len(named) > 1 and (unknown := [name for name in named.split(",") if name not in has]):
        raise RunError(
            f"GLOO_SOCKET_IFNAME={named}: this machine has no network interface {', '.join(unknown)}; choose one of "
            f"{has}, or unset it"
        )


def make_mesh(
    device_type: str, *, replicate: int = 1, shard: int | None = None, tp: int = 1, pp: int = 1
) -> DeviceMesh:
    """The (pp, replicate, shard, tp) mesh over all ranks of the default group, without pp or tp where they are 1;
    `shard=None` takes the remaining ranks.

    Raises ValueError when the degrees do not multiply to the world size.
    """
    world = dist.get_world_size()
    degree = world // (replicate * tp * pp) if shard is None else shard
    inner, outer = ({TENSOR: tp} if tp > 1 else {}), ({PIPELINE: pp} if pp > 1 else {})
    degrees = {**outer, REPLICATE: replicate, SHARD: degree, **inner}
    if math.prod(degrees.values()) != world:
        given = " * ".join(f"{axis}={each}" for axis, each in degrees.items())
        fixed = {number: size for number, (axis, size) in enumerate(degrees.items()) if axis not in AXES}
        every = factorings(world, len(degrees))
        allowed = [each for each in every if all(each[number] == size for number, size in fixed.items())] or every
        raise ValueError(f"{given} is not the world size {world}; ({', '.join(degrees)}) may be one of {allowed}")
    return _limited(init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)))


def _limited(mesh: DeviceMesh) -> DeviceMesh:
    """torch gives the groups that it makes 10 or 30 minutes: now all have what the default group has."""
    if dist.get_backend() != "fake":
        for axis in mesh.mesh_dim_names or ():
            _set_pg_timeout(timeout_of_ranks(), mesh.get_group(axis))
    return mesh


def take_mesh(mesh: DeviceMesh, axes: Mapping[str, str]) -> DeviceMesh:
    """Return the ranks of a mesh that another library made as (replicate, shard); an axis that it lacks has one rank.

    Args:
        mesh: Of data-parallel ranks alone.
        axes: Its names of our axes, e.g. {"replicate": "dp_replicate", "shard": "dp_shard"}.

    Raises:
        ValueError: For axes that are not ours, or not the mesh's, or that leave some of it out.
    """
    names = mesh.mesh_dim_names or ()
    if not set(axes) <= {*AXES} or set(axes.values()) != {*names} or len(names) != len(axes):
        raise ValueError(
            f"axes={dict(axes)} of a mesh with the axes {names}: name each of them once, as one of {AXES}; a mesh that "
            "cuts the model too comes from dzero.make_mesh"
        )
    ranks = mesh.mesh.permute([names.index(axes[axis]) for axis in AXES if axis in axes])
    for dim, axis in enumerate(AXES):
        ranks = ranks if axis in axes else ranks.unsqueeze(dim)
    return _limited(DeviceMesh(mesh.device_type, ranks, mesh_dim_names=AXES))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The (replicate, shard) part of `mesh` that this rank is in. Raises ValueError where it has no such axes."""
    names = mesh.mesh_dim_names or ()
    if tuple(each for each in names if each in AXES) != AXES:
        raise ValueError(
            f"mesh axes {names}: expected {AXES}, as dzero.make_mesh builds them; or say which they are: "
            f"dzero.take_mesh(mesh, {{'shard': {(names or ('dp',))[0]!r}}})"
        )
    return mesh if names == AXES else mesh[AXES]


def data_rank_of(mesh: DeviceMesh) -> int:
    """This rank among the data-parallel ones, those that see the same samples being one."""
    copy, own = (mesh.get_local_rank(axis) for axis in AXES)
    return copy * mesh[SHARD].size() + own


def context_group(mesh: DeviceMesh, cp: int) -> dist.ProcessGroup:
    """This rank's group of `cp` data-parallel neighbours, which share every sequence; `mesh`: all axes, all ranks call.

    Raises ValueError where cp does not divide the data-parallel ranks.
    """
    data = mesh[REPLICATE].size() * mesh[SHARD].size()
    if data % cp:
        allowed = divisors(data)
        raise ValueError(f"cp={cp} does not divide the {data} data-parallel ranks; allowed: {allowed}")
    parts = mesh[PIPELINE].size() if PIPELINE in (mesh.mesh_dim_names or ()) else 1
    ranks = mesh.mesh.reshape(parts, data // cp, cp, -1).transpose(2, 3).reshape(-1, cp)
    timeout = timeout_of_ranks()
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)  # type: ignore[no-untyped-call]
    return group


def expert_degrees(replicate: int, shard: int, ep: int, tp: int = 1) -> tuple[int, int]:
    """(replicate, shard) of what `ep` neighbours share, of whom `tp` are one data-parallel rank.

    Raises ValueError where they are not within one of the axes, or share with a part of such a rank."""
    axis, ranks = (REPLICATE, replicate) if shard == 1 else (SHARD, shard)
    if ep % tp == 0 and ranks % (ep // tp) == 0:
        others = ranks * tp // ep
        return (others, 1) if shard == 1 else (replicate, others)
    allowed = [tp * each for each in divisors(ranks)]
    told = f" x mesh.tp={tp}, all of which share them" if tp > 1 else ""
    raise ValueError(
        f"mesh.ep={ep} does not divide the {ranks} data-parallel ranks of axis {axis}{told}, of which experts are "
        f"shared by neighbours; allowed: {allowed}"
    )


def expert_mesh(mesh: DeviceMesh, ep: int) -> DeviceMesh:
    """The ranks of `mesh` that have the same layers as (replicate, shard, ep): those of ep are neighbours, which share
    the experts. All ranks call.

    Raises ValueError where ep does not divide, and for a mesh without the data-parallel axes.
    """
    data, names = data_mesh(mesh), mesh.mesh_dim_names or ()
    replicate, shard = expert_degrees(data.size(0), data.size(1), ep, tensor_ranks(mesh))
    outer = names[: names.index(REPLICATE)]
    ranks = mesh.mesh.reshape(*mesh.shape[: len(outer)], replicate, shard, ep)
    whole = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=(*outer, *AXES, EXPERT))
    return _limited(whole)[(*AXES, EXPERT)]


def tensor_ranks(mesh: DeviceMesh) -> int:
    """Ranks along tp."""
    return mesh[TENSOR].size() if TENSOR in (mesh.mesh_dim_names or ()) else 1


def model_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """This rank's groups along the axes that are not data-parallel."""
    return {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or () if axis not in AXES}


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
