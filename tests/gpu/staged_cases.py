"""Every collective that FSDP2 and DTensor use, on one rank: what a staged group is compared with gloo by.

Values are whole numbers so small that every order of additions gives the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from staged_group import BACKEND, staged
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

Group = dist.ProcessGroup
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


def numbers(group: Group, *shape: int, dtype: torch.dtype = torch.float32, to: int = 0) -> Tensor:
    """Return whole numbers that differ by rank, and by the rank that they go to."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (3 + group.rank()) + 7 * group.rank() + to) % 11).to(dtype).view(shape)


def all_reduces(group: Group) -> dict[str, Tensor]:
    found = {}
    for dtype in DTYPES:
        for name, op in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
            tensor = numbers(group, 3, 5, dtype=dtype)
            dist.all_reduce(tensor, op, group=group)
            found[f"{name} {dtype}"] = tensor
    late = numbers(group, 7)
    work = dist.all_reduce(late, group=group, async_op=True)
    assert work is not None
    work.wait()
    reduced = numbers(group, 4)
    dist.reduce(reduced, group_dst=1, group=group)
    if group.rank() == 1:  # elsewhere its content is not defined
        found["reduce"] = reduced
    return {**found, "late": late, "strided": funcol.all_reduce(numbers(group, 4, 3).t(), "sum", group).contiguous()}


def gathers(group: Group) -> dict[str, Tensor]:
    ranks, found = group.size(), {}
    for dtype in DTYPES:
        lists = [torch.zeros(2, 3, dtype=dtype) for _ in range(ranks)]
        dist.all_gather(lists, numbers(group, 2, 3, dtype=dtype), group=group)
        whole = torch.zeros(2 * ranks, 3, dtype=dtype)
        dist.all_gather_into_tensor(whole, numbers(group, 2, 3, dtype=dtype), group=group)
        assert torch.equal(torch.cat(lists), whole)
        found[f"gather {dtype}"] = whole
    single = torch.zeros(ranks, dtype=torch.int64)
    dist.all_gather_into_tensor(single, torch.tensor([group.rank()]), group=group)
    functional = funcol.all_gather_tensor(numbers(group, 3, 2), gather_dim=0, group=group)
    empty = torch.zeros(0)
    dist.all_gather_into_tensor(empty, torch.zeros(0), group=group)
    return {**found, "single": single, "functional": functional, "empty": empty}


def scatters(group: Group) -> dict[str, Tensor]:
    ranks, found = group.size(), {}
    for dtype in (torch.float32, torch.int64):
        out = torch.zeros(5, dtype=dtype)
        dist.reduce_scatter_tensor(out, numbers(group, 5 * ranks, dtype=dtype), group=group)
        found[f"scatter {dtype}"] = out
    listed = torch.zeros(3)
    dist.reduce_scatter(listed, [numbers(group, 3, to=rank) for rank in range(ranks)], group=group)
    functional = funcol.reduce_scatter_tensor(numbers(group, 2 * ranks, 3), "sum", 0, group)
    return {**found, "listed": listed, "functional": functional}


def turns(group: Group) -> dict[str, Tensor]:
    ranks, rank = group.size(), group.rank()
    even = torch.zeros(2 * ranks, 3)
    dist.all_to_all_single(even, numbers(group, 2 * ranks, 3), group=group)
    give = [(rank + peer) % 3 for peer in range(ranks)]
    take = [(peer + rank) % 3 for peer in range(ranks)]  # the same rule, seen from there
    uneven = torch.zeros(sum(take), 2, dtype=torch.bfloat16)
    sent = numbers(group, sum(give), 2, dtype=torch.bfloat16)
    whole, parts = (each.view(torch.uint8) for each in (uneven, sent))
    dist.all_to_all_single(whole, parts, take, give, group=group)
    functional = funcol.all_to_all_single(numbers(group, 2 * ranks), None, None, group)
    return {"even": even, "uneven": uneven, "functional": functional}


def messages(group: Group) -> dict[str, Tensor]:
    """Sends before receives on every rank, batched or not: no order of posting deadlocks."""
    ranks, rank = group.size(), group.rank()
    peers = [peer for peer in range(ranks) if peer != rank]
    came = {peer: torch.zeros(4) for peer in peers}
    ops = [dist.P2POp(dist.isend, numbers(group, 4, to=peer), group=group, group_peer=peer) for peer in peers]
    ops += [dist.P2POp(dist.irecv, came[peer], group=group, group_peer=peer) for peer in reversed(peers)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    twice = [torch.zeros(2, dtype=torch.int64) for _ in range(2)]
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    sends = [dist.isend(torch.tensor([rank, turn]), group=group, group_dst=following) for turn in range(2)]
    for each in twice:
        dist.recv(each, group=group, group_src=before)
    for work in sends:
        assert work is not None
        work.wait()
    return {"batched": torch.stack([*came.values()]), "twice": torch.stack(twice)}


def broadcasts(group: Group) -> dict[str, Tensor]:
    found = {}
    for root in (0, 2):
        tensor = numbers(group, 6)
        dist.broadcast(tensor, group=group, group_src=root)
        found[f"from {root}"] = tensor
    dist.barrier(group=group)
    return found


def dtensors(group: Group) -> dict[str, Tensor]:
    mesh = DeviceMesh.from_group(group, "cpu")
    local, found = numbers(group, 3, 4), {}
    found["full"] = DTensor.from_local(local, mesh, [Shard(0)]).full_tensor()
    found["moved"] = DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Shard(1)]).to_local()
    found["summed"] = DTensor.from_local(local, mesh, [Partial()]).full_tensor()
    found["cut"] = (
        DTensor.from_local(numbers(group, 8, 2), mesh, [Partial()]).redistribute(placements=[Shard(0)]).to_local()
    )
    whole = DTensor.from_local(local.clone().requires_grad_(), mesh, [Replicate()])
    found["average"] = DTensor.from_local(local, mesh, [Partial("avg")]).full_tensor()
    return {**found, "kept": whole.full_tensor().detach()}


def order(group: Group) -> dict[str, Tensor]:
    """Many begun at once, waited for from the last to the first; writes wait for what was computed before."""
    tensors = [numbers(group, 50, to=turn) for turn in range(20)]
    works = [dist.all_reduce(each, group=group, async_op=True) for each in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    return {"all": torch.stack(tensors)}


CASES: tuple[Callable[[Group], dict[str, Tensor]], ...] = (
    all_reduces, gathers, scatters, turns, messages, broadcasts, dtensors, order,
)  # fmt: skip


def compare(rank: int, ranks: int) -> list[str]:
    """Return what differs between gloo and a staged group, on this rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)  # torch 2.11 has no other names
        return _compare()


def _compare() -> list[str]:
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
    ranks = [*range(group.size())]
    groups = [dist.new_group(ranks, backend=BACKEND) for _ in range(2)]
    tensors = [numbers(group, 5) for _ in groups]
    order = [0, 1] if group.rank() % 2 else [1, 0]
    works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
    for work in works:
        assert work is not None
        work.wait()
    for each in groups:
        dist.destroy_process_group(each)
    return [] if torch.equal(*tensors) else ["halves"]
