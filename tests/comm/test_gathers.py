"""DTensors are gathered under a short name, because gloo's threads may free the memory of a long one twice.

`gather_under_short_names` in dzero/utils/torch_internals.py tells why.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from on_ranks import on_ranks
from pool import Pool
from torch.distributed.tensor import Shard, distribute_tensor

from dzero import make_mesh

KINDS = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import dzero

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
{}
group, output, part = dist.group.WORLD, torch.empty(1), torch.ones(1)
works = group._allgather_base(output, part), group.allgather_into_tensor_coalesced([output], [part])
print(*(work.wait() and work._get_op_type() for work in works))
dist.destroy_process_group()
"""
"""Prints the types of a plain gather and of a DTensor's, which gloo writes down as names."""
USERS_MESH = 'init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))'


@pytest.mark.parametrize(
    "begin", ['dzero.make_mesh("cpu")', f"dzero.shard(nn.Linear(2, 2), stage=3, mesh={USERS_MESH})"]
)
def test_gathers_of_dtensors_have_the_name_of_plain_ones(begin: str) -> None:
    """In a program of its own, as test workers have replaced the operator from their start."""
    ran = subprocess.run([sys.executable, "-c", KINDS.format(begin)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    plain, of_dtensors = ran.stdout.split()
    assert plain == of_dtensors


def gathered(rank: int, ranks: int) -> list[torch.Tensor]:
    """What each rank gathers: a DTensor, and two tensors in one call, which must return before rank 1 takes part."""
    mesh = make_mesh("cpu")
    whole = distribute_tensor(torch.arange(5.0), mesh["shard"], [Shard(0)]).full_tensor()
    outputs = [torch.empty(ranks * elems) for elems in (4, 3)]
    parts = [torch.full((4,), 1.0 + rank, requires_grad=True), torch.full((3,), 5.0 + rank)]
    if rank == 1:
        dist.recv(torch.empty(1), 0)
    work = mesh.get_group("shard").allgather_into_tensor_coalesced(outputs, parts)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    work.wait()
    return [whole, *outputs]


def test_several_tensors_are_gathered_at_once(pool: Pool) -> None:
    for found in pool.run(gathered, 2):
        assert [each.tolist() for each in found] == [[0, 1, 2, 3, 4], [1.0] * 4 + [2.0] * 4, [5.0] * 3 + [6.0] * 3]


@on_ranks(2)
def test_a_gather_into_the_wrong_size_is_still_refused(rank: int, ranks: int) -> None:
    make_mesh("cpu")
    with pytest.raises((RuntimeError, ValueError), match=r"llgather|size"):
        dist.group.WORLD.allgather_into_tensor_coalesced([torch.empty(3)], [torch.ones(4)]).wait()


@pytest.mark.full("tests/comm/test_gathers.py::test_several_tensors_are_gathered_at_once")
@on_ranks(1, timeout_s=300)
def test_half_a_million_gathers_do_not_crash(rank: int, ranks: int) -> None:
    """Gathers that end on both threads at the same time: torch 2.13 alone crashed within 400,000 in every run."""
    group = make_mesh("cpu").get_group("shard")
    output, part = torch.empty(4 * ranks), torch.ones(4)
    for _ in range(2500):
        for work in [group.allgather_into_tensor_coalesced([output], [part]) for _ in range(200)]:
            work.wait()
