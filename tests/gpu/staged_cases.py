"""Every collective that FSDP2, DTensor and dzero use, on one rank: what a staged group is compared with gloo by.

Values are whole numbers so small that every order of additions gives the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from staged_group import BACKEND, staged
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

Group = dist.ProcessGroup
Found = dict[str, Tensor]
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def numbers(group: Group, *shape: int, dtype: torch.dtype = torch.float32, to: int = 0) -> Tensor:
    """Return whole numbers that differ by rank, and by the rank that they go to."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (3 + group.rank()) + 7 * group.rank() + to) % 11).to(dtype).view(shape)


def wait_for(works: Sequence[Any]) -> None:
    for work in works:
        assert work is not None
        work.wait()


def all_reduces(group: Group) -> Found:
    found = {}
    for dtype in DTYPES:
        for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
            found[f"{name} {dtype}"] = numbers(group, 3, 5, dtype=dtype)
            dist.all_reduce(found[f"{name} {dtype}"], op, group=group)
    return {**found, "strided": funcol.all_reduce(numbers(group, 4, 3).t(), "sum", group).contiguous()}


def gathers(group: Group) -> Found:
    ranks, found = group.size(), {"empty": torch.zeros(0)}
    for dtype in DTYPES:
        lists = [torch.zeros(2, 3, dtype=dtype) for _ in range(ranks)]
        dist.all_gather(lists, numbers(group, 2, 3, dtype=dtype), group=group)
        found |= {f"list {dtype}": torch.cat(lists), f"whole {dtype}": torch.zeros(2 * ranks, 3, dtype=dtype)}
        dist.all_gather_into_tensor(found[f"whole {dtype}"], numbers(group, 2, 3, dtype=dtype), group=group)
    dist.all_gather_into_tensor(found["empty"], torch.zeros(0), group=group)
    return {**found, "functional": funcol.all_gather_tensor(numbers(group, 3, 2), gather_dim=0, group=group)}


def scatters(group: Group) -> Found:
    ranks, found = group.size(), {}
    for dtype in (torch.float32, torch.int64):
        found[f"{dtype}"] = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_tensor(found[f"{dtype}"], numbers(group, 5 * ranks, dtype=dtype), group=group)
    return {**found, "functional": funcol.reduce_scatter_tensor(numbers(group, 2 * ranks, 3), "sum", 0, group)}


def turns(group: Group) -> Found:
    ranks, rank = group.size(), group.rank()
    even = torch.zeros(2 * ranks, 3)
    dist.all_to_all_single(even, numbers(group, 2 * ranks, 3), group=group)
    rows = [(rank + peer) % 3 for peer in range(ranks)]  # to and from each peer: the rule is the same seen from there
    uneven, sent = torch.zeros(sum(rows), 2, dtype=torch.bfloat16), numbers(group, sum(rows), 2, dtype=torch.bfloat16)
    dist.all_to_all_single(uneven.view(torch.uint8), sent.view(torch.uint8), rows, rows, group=group)
    functional = funcol.all_to_all_single(numbers(group, 2 * ranks), None, None, group)
    return {"even": even, "uneven": uneven, "functional": functional}


def messages(group: Group) -> Found:
    """Sends before receives on every rank, batched or not: no order of posting deadlocks."""
    ranks, rank = group.size(), group.rank()
    peers = [peer for peer in range(ranks) if peer != rank]
    came = {peer: torch.zeros(4) for peer in peers}
    ops = [dist.P2POp(dist.isend, numbers(group, 4, to=peer), group=group, group_peer=peer) for peer in peers]
    ops += [dist.P2POp(dist.irecv, came[peer], group=group, group_peer=peer) for peer in reversed(peers)]
    wait_for(dist.batch_isend_irecv(ops))
    twice, following = [torch.zeros(2, dtype=torch.int64) for _ in range(2)], (rank + 1) % ranks
    sends = [dist.isend(torch.tensor([rank, turn]), group=group, group_dst=following) for turn in range(2)]
    for each in twice:
        dist.recv(each, group=group, group_src=(rank - 1) % ranks)
    wait_for(sends)
    return {"batched": torch.stack([*came.values()]), "twice": torch.stack(twice)}


def broadcasts(group: Group) -> Found:
    found = {f"from {root}": numbers(group, 6) for root in (0, 2)}
    for root in (0, 2):
        dist.broadcast(found[f"from {root}"], group=group, group_src=root)
    dist.barrier(group=group)
    return found


def dtensors(group: Group) -> Found:
    mesh, local, given = DeviceMesh.from_group(group, "cpu"), numbers(group, 3, 4), numbers(group, 8, 2)
    return {
        "full": DTensor.from_local(local, mesh, [Shard(0)]).full_tensor(),
        "moved": DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Shard(1)]).to_local(),
        "summed": DTensor.from_local(local, mesh, [Partial()]).full_tensor(),
        "average": DTensor.from_local(local, mesh, [Partial("avg")]).full_tensor(),
        "cut": DTensor.from_local(given, mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local(),
    }


def order(group: Group) -> Found:
    """Many begun at once, waited for from the last to the first; writes wait for what was computed before."""
    tensors = [numbers(group, 50, to=turn) for turn in range(20)]
    wait_for([dist.all_reduce(each, group=group, async_op=True) for each in tensors][::-1])
    return {"all": torch.stack(tensors)}


CASES: tuple[Callable[[Group], Found], ...] = (
    all_reduces, gathers, scatters, turns, messages, broadcasts, dtensors, order,
)  # fmt: skip


def compare(rank: int, ranks: int) -> list[str]:
    """Return what differs between gloo and a staged group, on this rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)  # torch 2.11 has no other names
        plain = dist.new_group(backend="gloo")
        wanted = [case(plain) for case in CASES]
        wrong = []
        with staged(torch.device("cpu")):
            group = dist.new_group(backend=BACKEND)
            for case, want in zip(CASES, wanted, strict=True):
                got = case(group)
                assert got.keys() == want.keys()
                wrong += [f"{case.__name__} {name}" for name in want if not torch.equal(got[name], want[name])]
            wrong += halves(group)
            dist.destroy_process_group(group)
        dist.destroy_process_group(plain)
        return wrong


def halves(group: Group) -> list[str]:
    """Two groups at once, in another order on every second rank: one waits for no other."""
    groups = [dist.new_group([*range(group.size())], backend=BACKEND) for _ in range(2)]
    tensors = [numbers(group, 5) for _ in groups]
    begun = (0, 1) if group.rank() % 2 else (1, 0)
    wait_for([dist.all_reduce(tensors[at], group=groups[at], async_op=True) for at in begun])
    for each in groups:
        dist.destroy_process_group(each)
    return [] if torch.equal(*tensors) else ["halves"]
