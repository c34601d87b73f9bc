"""Promises of the pool of worker processes."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import TOLERATED, Pool, WorkerError
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from training_loops import bits


def summed(rank: int, ranks: int, base: Tensor) -> tuple[Tensor, int]:
    total = base + rank
    dist.all_reduce(total)
    return total, dist.get_world_size()


def echo(rank: int, ranks: int, value: Any) -> Any:
    return value


def identity(rank: int, ranks: int) -> tuple[int, int, float]:
    return os.getpid(), torch.get_num_threads(), torch.rand(()).item()


def dtensor(rank: int, ranks: int) -> Any:
    model = nn.Linear(2, 2)
    fully_shard(model)
    return model.weight


def one_fails(rank: int, ranks: int, failing: int) -> None:
    if rank == failing:
        raise KeyError(f"stage of rank {rank}")
    dist.barrier()


def one_dies(rank: int, ranks: int) -> None:
    if rank == 1:
        os._exit(7)
    dist.barrier()


KEPT: list[Any] = []


def keeping(rank: int, ranks: int) -> None:
    if rank == 1:
        KEPT.append(dist.group.WORLD)


def sleeps(rank: int, ranks: int) -> None:
    time.sleep(60)


def test_results_come_in_rank_order_from_one_group_of_every_size(pool: Pool) -> None:
    for ranks in (2, 4, 1):
        results = pool.run(summed, ranks, torch.ones(3))
        expected = torch.full((3,), float(ranks + sum(range(ranks))))
        assert [(total.tolist(), size) for total, size in results] == [(expected.tolist(), ranks)] * ranks


def test_workers_are_kept_single_threaded_and_seeded_alike(pool: Pool) -> None:
    first, second = pool.run(identity, 2), pool.run(identity, 2)
    assert first == second
    assert len({pid for pid, _, _ in first}) == 2
    assert {(threads, drawn) for _, threads, drawn in first} == {(1, first[0][2])}


def test_tensors_of_every_dtype_and_shape_travel_with_their_bits(pool: Pool) -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int16, torch.bool)
    sent = [torch.randn(shape).mul(9).to(dtype) for dtype in dtypes for shape in ((), (0, 3), (2, 3))]
    (nested,) = pool.run(echo, 1, {"a": sent})
    for back, each in zip(nested["a"], sent, strict=True):
        assert (back.dtype, back.shape) == (each.dtype, each.shape)
        assert torch.equal(bits(back), bits(each))


def test_a_dtensor_is_refused_with_the_repair(pool: Pool) -> None:
    with pytest.raises(WorkerError, match=r"to_local\(\) or full_tensor\(\)"):
        pool.run(dtensor, 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_failure_is_raised_and_ranks_left_in_a_collective_are_replaced(pool: Pool, failing: int) -> None:
    pool.run(echo, 2, None)
    left = pool.pids[1 - failing]
    with pytest.raises(WorkerError, match=rf"rank {failing} of 2: Traceback[\s\S]*KeyError: 'stage of rank {failing}'"):
        pool.run(one_fails, 2, failing)
    assert left not in pool.pids
    with pytest.raises(ProcessLookupError):
        os.kill(left or 0, 0)
    assert pool.run(summed, 2, torch.zeros(1))[0][0].item() == 1.0


def test_a_dead_worker_is_named_with_its_exit_code(pool: Pool) -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2: the process died with exit code 7"):
        pool.run(one_dies, 2)


def test_a_run_that_takes_too_long_is_ended() -> None:
    with Pool() as pool:
        with pytest.raises(TimeoutError, match=r"ranks \[0\] of 1 did not return within 0.5 s"):
            pool.run(sleeps, 1, timeout_s=0.5)
        (pid, _, _) = pool.run(identity, 1)[0]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.skipif(TOLERATED > 0, reason="torch before 2.13 keeps groups itself: workers are replaced after many runs")
def test_a_worker_in_which_a_group_outlives_its_run_is_replaced(pool: Pool) -> None:
    before, told = pool.run(identity, 2), len(pool.kept)
    pool.run(keeping, 2)
    assert pool.kept[told:] == ["keeping"]
    after = pool.run(identity, 2)
    assert after[0][0] == before[0][0]
    assert before[1][0] not in {pid for pid, *_ in after}
    assert len(pool.kept) == told + 1
