"""DTensors are gathered under a short name, because gloo's threads may free the memory of a long one twice.

`gather_under_short_names` in dzero/utils/torch_internals.py tells why.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed.tensor import Shard, distribute_tensor

from dzero.mesh import SHARD, make_mesh


def gathered(rank: int, ranks: int) -> list[torch.Tensor]:
    """What each rank gathers: two tensors at once, and a DTensor."""
    mesh = make_mesh("cpu")
    group = mesh.get_group(SHARD)
    plain = group._allgather_base(torch.empty(ranks), torch.ones(1))
    outputs = [torch.empty(ranks * elems) for elems in (4, 3)]
    work = group.allgather_into_tensor_coalesced(outputs, [torch.full((4,), 1.0 + rank), torch.full((3,), 5.0 + rank)])
    assert work._get_op_type() == plain._get_op_type()
    plain.wait()
    work.wait()
    whole = distribute_tensor(torch.arange(5.0), mesh[SHARD], [Shard(0)])
    return [*outputs, whole.full_tensor()]


def test_gathers_of_dtensors_have_the_name_of_plain_ones(pool: Pool) -> None:
    for found in pool.run(gathered, 2):
        assert [each.tolist() for each in found] == [[1.0] * 4 + [2.0] * 4, [5.0] * 3 + [6.0] * 3, [0, 1, 2, 3, 4]]


def mismatched(rank: int, ranks: int) -> str:
    make_mesh("cpu")
    with pytest.raises((RuntimeError, ValueError)) as error:
        dist.group.WORLD.allgather_into_tensor_coalesced([torch.empty(3)], [torch.ones(4)]).wait()
    return str(error.value)


def test_a_gather_into_the_wrong_size_is_still_refused(pool: Pool) -> None:
    assert pool.run(mismatched, 2)[0]


def many(rank: int, ranks: int) -> None:
    """Gathers that end on both threads at the same time, as often as crashed torch 2.13 five times of five."""
    group = make_mesh("cpu").get_group(SHARD)
    output, part = torch.empty(4 * ranks), torch.ones(4)
    for _ in range(2500):
        for work in [group.allgather_into_tensor_coalesced([output], [part]) for _ in range(200)]:
            work.wait()


@pytest.mark.full
def test_half_a_million_gathers_do_not_crash(pool: Pool) -> None:
    pool.run(many, 1, timeout_s=300)
