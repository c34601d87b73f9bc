"""Process group, device mesh and groups of ranks, from the degrees of the axes.

    axis       contents of each rank along it                       stage 0   stages 1-3   hybrid (HSDP)
    replicate  replicas of the same shards                             N          1          outside
    shard      1/shard of every sharded state                          1          N          inside
    tp         1/tp of every matrix, and of sequences between blocks
    pp         some of the layers

The ranks of the first two axes are the data-parallel ranks, N = replicate x shard = dp x cp. Each reads its own tokens,
and every placement in the layout (`zero/layout.py`) is a pair over them. Ranks along tp and pp read the same tokens.

cp is not an axis of the mesh, but a separate group: cp neighboring data-parallel ranks share their sequences, and each
processes a part of every sequence (`parallel/context/parallelize.py`). Only code that reads sequences depends on it.

ep is not an axis of this mesh either. ep neighboring ranks share the experts of a mixture; each holds 1/ep of the
experts as whole experts. States of experts are placed over the other ranks, by a separate mesh (`expert_mesh`). With
pp, that mesh covers the ranks with the same layers. Neighbors are data-parallel ranks. With tp, the ranks of a tp group
come first, since each has its own tokens between blocks:

    replicate x shard x ep    with shard = full shard * tp / ep; at stage 0, replicate = full replicate * tp / ep

Neighboring ranks are along the last axis, and groups of them along the one before it: (pp, replicate, shard, tp). If
tp, or shard x tp, is the number of ranks of a node, the heaviest traffic stays inside the node. The lightest traffic,
that of pp, goes the farthest.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import socket
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from itertools import count

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dzero.errors import RunError
from dzero.mesh_config import factorings
from dzero.rendezvous import rendezvous
from dzero.utils.launched import one_of_several
from dzero.utils.ranges import divisors
from dzero.utils.torch_internals import (
    GATHERS,
    TIMEOUTS,
    check,
    gather_under_short_names,
    set_timeout,
    timeout_of,
)

logger = logging.getLogger(__name__)
REPLICATE, SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE = "replicate", "shard", "tp", "cp", "ep", "pp"
AXES = (REPLICATE, SHARD)
"""Axes of the data-parallel ranks."""


LATER = timedelta(seconds=30)
LOOPBACK = ("lo", "lo0")


class _MadeOnce:
    """Groups of ranks within one default group: each is made once, because torch keeps all until that one is destroyed.

    They are known by weak references, so that neither they nor their threads outlive the default group.
    """

    def __init__(self) -> None:
        self._within: Callable[[], dist.ProcessGroup | None] = lambda: None
        self._made: dict[Hashable, list[weakref.ref[dist.ProcessGroup]]] = {}

    def __call__(self, key: Hashable, make: Callable[[], Sequence[dist.ProcessGroup]]) -> list[dist.ProcessGroup]:
        """Return the groups that `make` returned for `key` within the present default group. Collective at first."""
        world = dist.group.WORLD
        assert world is not None
        if self._within() is not world:
            self._within, self._made = weakref.ref(world), {}
        if key not in self._made:
            self._made[key] = [weakref.ref(each) for each in make()]
        groups = [known() for known in self._made[key]]
        return [each for each in groups if each is not None]

    def mesh(self, device_type: str, ranks: torch.Tensor, axes: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh of `ranks` with a dimension for each of `axes`. Collective the first time."""
        key = device_type, axes, tuple(ranks.shape), tuple(ranks.flatten().tolist())

        def make() -> list[dist.ProcessGroup]:
            return DeviceMesh(device_type, ranks, mesh_dim_names=axes).get_all_groups()

        return DeviceMesh.from_group(self(key, make), device_type, ranks, mesh_dim_names=axes)


_made_once = _MadeOnce()
_lanes: weakref.WeakKeyDictionary[dist.ProcessGroup, Iterator[int]] = weakref.WeakKeyDictionary()
"""Numbers of the next lanes, by the group that they share."""
_models: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()
"""How many models were sharded within a default group, by their ranks."""


def next_model(mesh: DeviceMesh) -> int:
    """Return the number of a model that is sharded now, from 1, among those on the ranks of `mesh`."""
    world, ranks = dist.group.WORLD, tuple(mesh.mesh.flatten().tolist())
    assert world is not None
    models = _models.setdefault(world, Counter())
    models[ranks] += 1
    return models[ranks]


def join_alone() -> None:
    """Make a process group of this process alone, unless there is a group: in a notebook, a unit test, a debugger.

    The group is left when the program ends.

    Raises:
        RuntimeError: A launcher has started several processes, which must join one group.
    """
    if dist.is_initialized():
        return
    if (several := one_of_several()) is not None:
        raise RuntimeError(
            f"{several}, so this is one of several processes: call torch.distributed.init_process_group() first, or if "
            f"it is the only one, unset {several.partition('=')[0]}"
        )
    if "GLOO_SOCKET_IFNAME" not in os.environ:  # gloo listens even if nobody comes: by itself at the machine's address
        os.environ["GLOO_SOCKET_IFNAME"] = next((name for _, name in socket.if_nameindex() if name in LOOPBACK), "")
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, but torch leaves it out of __all__
    dist.init_process_group(store=store, rank=0, world_size=1)
    atexit.register(_leave)
    logger.warning("no process group and no launcher: this process trains alone; torchrun starts several")


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def process_group(device: torch.device, *, timeout: timedelta) -> Iterator[None]:
    """Join the process group that torchrun's environment variables describe, and leave it at the end.

    CPU tensors use gloo and CUDA tensors nccl, in one group. nccl gets `LATER` on top of the timeout, because its own
    timeout would end the process before the ranks have reported where they are (`comm/watchdog.py`).

    Args:
        device: Device of this rank.
        timeout: Timeout of the collectives.
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
    """Raise RunError if GLOO_SOCKET_IFNAME, which gloo reads, names a network interface that does not exist."""
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
    """Return the (pp, replicate, shard, tp) mesh over all ranks of the default group, without pp or tp of size 1.

    Args:
        device_type: Type of the ranks' devices.
        replicate: Ranks along replicate.
        shard: Ranks along shard. None: all remaining ranks.
        tp: Ranks along tp.
        pp: Ranks along pp.

    Raises:
        ValueError: If the product of the degrees is not the world size.
    """
    if not isinstance(device_type, str):
        raise TypeError(f"make_mesh({device_type!r}): the first argument is the type of device, 'cuda' or 'cpu'")
    join_alone()
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
    axes, sizes = tuple(degrees), tuple(degrees.values())
    return _prepared(_made_once.mesh(device_type, torch.arange(world, device="cpu").reshape(sizes), axes))


def _prepared(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh`, with safe gathers, and the default group's timeout in place of torch's 10 or 30 minutes."""
    check((TIMEOUTS, GATHERS))
    gather_under_short_names()
    if TIMEOUTS.is_there and dist.get_backend() != "fake":
        for axis in mesh.mesh_dim_names or ():
            set_timeout(timeout_of_ranks(), mesh.get_group(axis))
    return mesh


def _check_mesh(given: object, where: str) -> None:
    """Raise TypeError if an argument that must be a mesh is something else."""
    if not isinstance(given, DeviceMesh):
        raise TypeError(f"{where} {given!r}: pass a DeviceMesh, such as dzero.make_mesh('cuda', replicate=2) returns")


def take_mesh(mesh: DeviceMesh, axes: Mapping[str, str]) -> DeviceMesh:
    """Return the ranks of another library's mesh as (replicate, shard); an axis that it lacks gets size 1.

    Args:
        mesh: Mesh of data-parallel ranks only.
        axes: Its axis names, by the names used here, e.g. {"replicate": "dp_replicate", "shard": "dp_shard"}.

    Raises:
        ValueError: If an axis is unknown, or some of the mesh's axes are not named.
    """
    _check_mesh(mesh, "take_mesh of")
    names = mesh.mesh_dim_names or ()
    if not set(axes) <= {*AXES} or set(axes.values()) != {*names} or len(names) != len(axes):
        raise ValueError(
            f"axes={dict(axes)} of a mesh with the axes {names}: name each of them once, as one of {AXES}; a mesh that "
            "cuts the model too comes from dzero.make_mesh"
        )
    ranks = mesh.mesh.permute([names.index(axes[axis]) for axis in AXES if axis in axes])
    for dim, axis in enumerate(AXES):
        ranks = ranks if axis in axes else ranks.unsqueeze(dim)
    return _prepared(_made_once.mesh(mesh.device_type, ranks, AXES))


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the (replicate, shard) submesh of `mesh` with this rank; raise ValueError if it has no such axes."""
    _check_mesh(mesh, "a mesh:")
    names = mesh.mesh_dim_names or ()
    if tuple(each for each in names if each in AXES) != AXES:
        raise ValueError(
            f"mesh axes {names}: expected {AXES}, as dzero.make_mesh builds them; or say which they are: "
            f"dzero.take_mesh(mesh, {{'shard': {(names or ('dp',))[0]!r}}})"
        )
    return mesh if names == AXES else mesh[AXES]


def data_rank_of(mesh: DeviceMesh) -> int:
    """Return the index of this rank among the data-parallel ranks; ranks along tp and pp have the same index."""
    copy, own = (mesh.get_local_rank(axis) for axis in AXES)
    return copy * mesh[SHARD].size() + own


def context_group(mesh: DeviceMesh, cp: int) -> dist.ProcessGroup:
    """Return this rank's group of `cp` neighboring data-parallel ranks, which share every sequence. Collective.

    Args:
        mesh: Mesh with all axes.
        cp: Size of the group.

    Raises:
        ValueError: If cp does not divide the data-parallel ranks.
    """
    data = mesh[REPLICATE].size() * mesh[SHARD].size()
    if data % cp:
        allowed = divisors(data)
        raise ValueError(f"cp={cp} does not divide the {data} data-parallel ranks; allowed: {allowed}")
    parts = mesh[PIPELINE].size() if PIPELINE in (mesh.mesh_dim_names or ()) else 1
    ranks = mesh.mesh.reshape(parts, data // cp, cp, -1).transpose(2, 3).reshape(-1, cp)

    def make() -> list[dist.ProcessGroup]:
        timeout = timeout_of_ranks()
        made, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), timeout=timeout)  # type: ignore[no-untyped-call]
        assert isinstance(made, dist.ProcessGroup)
        return [made]

    (group,) = _made_once((CONTEXT, *map(tuple, ranks.tolist())), make)
    return group


@dataclass(frozen=True)
class Lane:
    """Messages of one thread on the host, beside those of the main thread and of other lanes.

    Attributes:
        group: Group that the lanes of its ranks share.
        number: Number of the lane in it.
    """

    group: dist.ProcessGroup
    number: int


def lane_of(group: dist.ProcessGroup) -> Lane:
    """Return a new lane of the ranks of `group`. Collective over it, and all ranks make their lanes in one order."""
    ranks = dist.get_process_group_ranks(group)

    def make() -> list[dist.ProcessGroup]:
        backend = "gloo" if "gloo" in dist.get_backend_config() else None
        made = dist.new_group(ranks, timeout_of_ranks(), backend, use_local_synchronization=True)
        assert isinstance(made, dist.ProcessGroup)
        return [made]

    (shared,) = _made_once(("lanes", *ranks), make)
    return Lane(shared, next(_lanes.setdefault(shared, count())))


def expert_degrees(replicate: int, shard: int, ep: int, tp: int = 1) -> tuple[int, int]:
    """Return (replicate, shard) of the experts that `ep` neighboring ranks share.

    Args:
        replicate: Data-parallel ranks along replicate.
        shard: Data-parallel ranks along shard.
        ep: Ranks that share the experts.
        tp: Size of the tp groups, each of which is one data-parallel rank.

    Raises:
        ValueError: If the ranks of ep are not within one axis, or include a part of a tp group.
    """
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
    """Return the ranks of `mesh` with the same layers as (replicate, shard, ep). Collective.

    Neighbors along ep share the experts.

    Raises:
        ValueError: If ep does not divide the ranks, or the mesh has no data-parallel axes.
    """
    data, names = data_mesh(mesh), mesh.mesh_dim_names or ()
    replicate, shard = expert_degrees(data.size(0), data.size(1), ep, tensor_ranks(mesh))
    outer = names[: names.index(REPLICATE)]
    ranks = mesh.mesh.reshape(*mesh.shape[: len(outer)], replicate, shard, ep)
    axes = (*outer, *AXES, EXPERT)
    return _prepared(_made_once.mesh(mesh.device_type, ranks, axes))[(*AXES, EXPERT)]


def tensor_ranks(mesh: DeviceMesh) -> int:
    """Return the number of ranks along tp."""
    return mesh[TENSOR].size() if TENSOR in (mesh.mesh_dim_names or ()) else 1


def model_groups(mesh: DeviceMesh) -> dict[str, dist.ProcessGroup]:
    """Return this rank's groups along the axes that are not data-parallel, by axis."""
    return {axis: mesh.get_group(axis) for axis in mesh.mesh_dim_names or () if axis not in AXES}


def timeout_of_ranks() -> timedelta:
    """Return the timeout of the default process group; not for a fake group, which has none."""
    group = dist.group.WORLD
    assert group is not None
    return timeout_of(group)


def host_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of the same ranks for tensors in host memory: `mesh` itself on the CPU, else one over gloo.

    Raises:
        RuntimeError: If the process group supports no CPU tensors.
    """
    if mesh.device_type == "cpu":
        return mesh
    if "cpu" not in dist.get_backend_config():
        raise RuntimeError(
            f"the process group is {dist.get_backend_config()}: states in host memory need one that moves CPU tensors "
            'too, e.g. init_process_group("cpu:gloo,cuda:nccl")'
        )
    return _made_once.mesh("cpu", mesh.mesh, mesh.mesh_dim_names or ())
