"""The host memory pool: never beyond its budget, no slot used twice, and what it lacks is told before it is touched."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from dzero.hardware import rss_bytes
from dzero.offload.memory_pool import ALIGNMENT_BYTES, HUGE_PAGE_BYTES, HostMemoryPool, LeasePhase, aligned, require


def test_leases_are_aligned_apart_and_within_the_budget() -> None:
    memory_pool = HostMemoryPool(3 * HUGE_PAGE_BYTES - 5)
    assert memory_pool.capacity_bytes == 3 * HUGE_PAGE_BYTES
    first, second = memory_pool.lease(10, "a"), memory_pool.lease(HUGE_PAGE_BYTES, "b")
    assert first.data.data_ptr() % HUGE_PAGE_BYTES == 0
    assert second.data.data_ptr() - first.data.data_ptr() == ALIGNMENT_BYTES
    assert memory_pool.leased_bytes == memory_pool.high_water_bytes == aligned(10) + HUGE_PAGE_BYTES
    second.data.fill_(7)
    assert int(first.data.max()) == 0
    beyond = r"c: 4\.00 MiB do not fit the host memory pool of 6\.00 MiB, of which 2\.00 MiB"
    with pytest.raises(MemoryError, match=beyond):
        memory_pool.lease(2 * HUGE_PAGE_BYTES, "c")
    memory_pool.lease(10, "b").release()  # of the same name as one that stays


def test_pages_are_touched_by_threads_on_the_cores_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core, bind, mine = max(os.sched_getaffinity(0)), os.sched_setaffinity, os.sched_getaffinity(0)
    bound: dict[int, set[int]] = {}

    def watched(pid: int, cores: list[int]) -> None:
        bind(pid, cores)
        bound[threading.get_ident()] = os.sched_getaffinity(0)

    monkeypatch.setattr(os, "sched_setaffinity", watched)
    memory_pool = HostMemoryPool(260 << 20, cores=[core])
    first, second = memory_pool.lease(130 << 20, "first"), memory_pool.lease(130 << 20, "second")
    assert bound == {}
    view = first.view(torch.float32, 8)
    assert list(bound.values()) == [{core}]
    assert threading.get_ident() not in bound
    assert os.sched_getaffinity(0) == mine
    view.fill_(3)
    second.data[0] = 5
    bound.clear()
    memory_pool.settle()
    assert len(bound) == 1
    assert view.tolist() == [3] * 8  # was touched before
    bound.clear()
    memory_pool.settle()
    assert bound == {}


def test_memory_is_taken_when_it_is_first_looked_at() -> None:
    before = rss_bytes()
    memory_pool = HostMemoryPool(256 << 20)
    leases = [memory_pool.lease(64 << 20, str(index)) for index in range(4)]
    assert rss_bytes() - before < 32 << 20
    leases[1].view(torch.uint8, 1)
    assert 64 << 20 <= rss_bytes() - before < 96 << 20
    memory_pool.settle()
    assert 256 << 20 <= rss_bytes() - before < 288 << 20


def test_what_is_given_back_can_be_leased_again_as_one_piece() -> None:
    memory_pool = HostMemoryPool(4 * HUGE_PAGE_BYTES)
    leases = [memory_pool.lease(HUGE_PAGE_BYTES, str(index)) for index in range(4)]
    for index in (2, 0, 1):
        leases[index].release()
    assert memory_pool.leased_bytes == HUGE_PAGE_BYTES
    assert memory_pool.lease(3 * HUGE_PAGE_BYTES, "whole").offset == 0
    assert memory_pool.high_water_bytes == 4 * HUGE_PAGE_BYTES


def test_views_have_the_dtype_asked_for() -> None:
    lease = HostMemoryPool(HUGE_PAGE_BYTES).lease(64, "x")
    lease.view(torch.bfloat16, 4, start_bytes=8).fill_(1.0)
    assert lease.view(torch.int16, 32).tolist() == [0] * 4 + [0x3F80] * 4 + [0] * 24


def test_a_slot_has_one_user_at_a_time() -> None:
    lease = HostMemoryPool(HUGE_PAGE_BYTES).lease(64, "grad layers.0")
    lease.enter(LeasePhase.ARRIVING)
    with pytest.raises(RuntimeError, match=r"grad layers.0 is arriving; it cannot be computing as well"):
        lease.enter(LeasePhase.COMPUTING)
    with pytest.raises(RuntimeError, match="is arriving"):
        lease.release()
    lease.enter(LeasePhase.HELD)
    lease.release()
    with pytest.raises(RuntimeError, match="is given back"):
        lease.release()


def test_too_little_host_memory_is_told_with_the_sum() -> None:
    require(2 * HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES, ranks=2)
    with pytest.raises(MemoryError, match=r"6\.00 MiB of host memory for each of 2 ranks, 12\.0 MiB in all; 10\.0 MiB"):
        require(3 * HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES, ranks=2)


def test_nothing_is_taken_for_nothing() -> None:
    memory_pool = HostMemoryPool(0)
    assert memory_pool.capacity_bytes == memory_pool.high_water_bytes == 0
