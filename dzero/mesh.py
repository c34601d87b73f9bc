"""Axis names and degrees -> DeviceMesh.

    axis       ranks along it                                   stage 0   stages 1-3   hybrid (HSDP)
    replicate  hold copies of the same shards                      N          1          outside
    shard      hold 1/shard of every sharded state                 1          N          inside
    tp         hold 1/tp of every matrix, and of every sequence between blocks
    pp         hold some of the layers

The first two are the data-parallel ranks, N = replicate x shard = dp x cp: each sees tokens of its own, and every
placement in the table (`zero/layout.py`) is a pair over them. Ranks of the others see the same tokens.

cp is no axis of the mesh but a group of its own: cp data-parallel neighbours share their sequences, and each sees a
part of every one (parallel/context.py). ZeRO takes no notice of it, only what reads sequences does.

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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout

from dzero.meeting import meet

REPLICATE, SHARD, TENSOR, CONTEXT, EXPERT, PIPELINE = "replicate", "shard", "tp", "cp", "ep", "pp"
AXES = (REPLICATE, SHARD)
"""Of the data-parallel ranks."""
CP_ATTENTIONS = ("all_gather", "ulysses")
PARTS_OF_A_RANK = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zero_bubble": 2}
"""By default, of every schedule of a pipeline."""


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Degrees of the axes; dp x cp x tp x pp is the number of ranks.

    `dp`: ranks, or groups of them, that read sequences of their own; None for all that are left. `replicate`: copies of
    the sharded model (hybrid sharding); 1 = shard over all data-parallel ranks, dp x cp. Stage 0 replicates over all of
    them by itself, so it takes no degree. `cp`: ranks that share every sequence (context parallelism). `cp_attention`:
    how they attend, `all_gather` or `ulysses` (parallel/attention.py). `tp`: ranks that share every matrix (tensor and
    sequence parallelism). `ep`: ranks, of the dp x cp x tp, that share the experts (expert parallelism); those of tp
    are among them. `pp`: ranks that share the layers (pipeline parallelism), each `pp_parts` parts of the model;
    `pp_schedule`: in which order they run them (parallel/pipeline.py).
    """

    dp: int | None = None
    replicate: int = 1
    cp: int = 1
    cp_attention: str = "all_gather"
    tp: int = 1
    ep: int = 1
    pp: int = 1
    pp_schedule: str = "1f1b"
    pp_parts: int | None = None

    def __post_init__(self) -> None:
        for key in ("dp", "replicate", "cp", "tp", "ep", "pp", "pp_parts"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"mesh.{key}={value}: must be a whole number ≥ 1")
        if self.cp_attention not in CP_ATTENTIONS:
            raise ValueError(f"mesh.cp_attention={self.cp_attention!r}: choose one of {[*CP_ATTENTIONS]}")
        if self.cp == 1 and self.cp_attention != CP_ATTENTIONS[0]:
            raise ValueError(f"mesh.cp_attention={self.cp_attention} has no effect with mesh.cp=1; remove it")
        self._check_schedule()

    def _check_schedule(self) -> None:
        schedule, parts = self.pp_schedule, self.pp_parts
        if schedule not in PARTS_OF_A_RANK:
            raise ValueError(f"mesh.pp_schedule={schedule!r}: choose one of {[*PARTS_OF_A_RANK]}")
        for key, value, default in (("pp_schedule", schedule, "1f1b"), ("pp_parts", parts, None)):
            if self.pp == 1 and value != default:
                raise ValueError(f"mesh.{key}={value} has no effect with mesh.pp=1; remove it")
        if parts is not None and (parts == 1) != (PARTS_OF_A_RANK[schedule] == 1):
            many = [each for each in PARTS_OF_A_RANK if (PARTS_OF_A_RANK[each] == 1) == (parts == 1)]
            raise ValueError(
                f"mesh.pp_parts={parts} with mesh.pp_schedule={schedule}: so many parts on a rank are for {many}"
            )

    @property
    def parts_of_a_rank(self) -> int:
        """Of the model, where it is cut between its layers."""
        return self.pp_parts or PARTS_OF_A_RANK[self.pp_schedule]

    @property
    def inner(self) -> int:
        """Ranks that one sequence needs."""
        return self.cp * self.tp * self.pp

    @property
    def sharing(self) -> int:
        """The fewest ranks with the same layers that share experts, sequences and matrices among themselves."""
        return math.lcm(self.cp, -(-self.ep // self.tp)) * self.tp

    @property
    def ranks(self) -> int | None:
        """How many the degrees make; None where dp is what is left."""
        return None if self.dp is None else self.dp * self.inner

    def data_ranks(self, world: int) -> int:
        """Of `world` ranks. Raises ValueError where the degrees do not make them."""
        if world % self.inner == 0 and self.dp in (None, world // self.inner):
            return world // (self.tp * self.pp)
        degrees = {"dp": self.dp, "cp": self.cp, "tp": self.tp, "pp": self.pp}
        given = " x ".join(f"mesh.{key}={value}" for key, value in degrees.items() if value not in (None, 1))
        start = f", or start {self.ranks} (without torchrun launch.workers={self.ranks})" if self.ranks else ""
        raise ValueError(
            f"{given or 'mesh.dp=1'}, but there are {world} ranks: (dp, cp, tp, pp) that make as many: "
            f"{_nearest(world, [*degrees.values()])}{start}"
        )

    def readers(self, data_ranks: int) -> int:
        """Of so many data-parallel ranks, the groups that read sequences of their own."""
        return data_ranks // self.cp

    def check_tokens(self, tokens: int) -> None:
        """Of a sequence. Raises ValueError where a rank's part of it would be none."""
        unit = self.tp if self.cp == 1 else self.cp * math.lcm(2, self.tp)
        if tokens % unit:
            parts = {"cp": "2 of 2 x cp chunks of every sequence", "tp": "an equal part of it between blocks"}
            cutting = {f"mesh.{key}={degree}": parts[key] for key in parts if (degree := getattr(self, key)) > 1}
            raise ValueError(
                f"{' x '.join(cutting)} does not divide train.sequence_tokens={tokens}: a rank has "
                f"{', '.join(cutting.values())}; take a multiple of {unit}, as train.sequence_tokens="
                f"{tokens // unit * unit or unit}"
            )

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
        every = _factorings(world, len(degrees))
        allowed = [each for each in every if all(each[number] == size for number, size in fixed.items())] or every
        raise ValueError(f"{given} is not the world size {world}; ({', '.join(degrees)}) may be one of {allowed}")
    return _limited(init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees)))


def _limited(mesh: DeviceMesh) -> DeviceMesh:
    """torch gives the groups that it makes 10 or 30 minutes: now all have what the default group has."""
    if dist.get_backend() != "fake":
        for axis in mesh.mesh_dim_names or ():
            _set_pg_timeout(timeout_of_ranks(), mesh.get_group(axis))
    return mesh


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The (replicate, shard) part of `mesh` that this rank is in. Raises ValueError where it has no such axes."""
    names = mesh.mesh_dim_names or ()
    if tuple(each for each in names if each in AXES) != AXES:
        raise ValueError(f"mesh axes {names}: expected {AXES}, as dzero.make_mesh builds them")
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
        allowed = [each for each in range(1, data + 1) if data % each == 0]
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
    allowed = [tp * each for each in range(1, ranks + 1) if ranks % each == 0]
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


def _factorings(number: int, factors: int = 2) -> list[tuple[int, ...]]:
    """All ordered products of so many whole numbers that make `number`."""
    if factors == 1:
        return [(number,)]
    divisors = [each for each in range(1, number + 1) if number % each == 0]
    return [(each, *rest) for each in divisors for rest in _factorings(number // each, factors - 1)]


def _nearest(number: int, wanted: Sequence[int | None], most: int = 12) -> str:
    """Products that make `number`, those alone that keep most of the `wanted` factors, the simplest first; None, 1: not
    asked for."""
    asked = [index for index, each in enumerate(wanted) if each not in (None, 1)]
    every = _factorings(number, len(wanted))
    kept = {each: sum(each[index] == wanted[index] for index in asked) for each in every}
    found = sorted((each for each in every if kept[each] == max(kept.values())), key=lambda each: -each.count(1))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return f"{found[:most]}{more}"


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
