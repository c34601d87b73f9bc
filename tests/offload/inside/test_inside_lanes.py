"""Who runs when, in lanes and slots; and host memory: never beyond its budget, no slot used twice."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from threading import Barrier, Event

import pytest
import torch

from dzero.hardware import rss_bytes
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import ALIGNMENT_BYTES, HUGE_PAGE_BYTES, HostMemoryPool, LeasePhase, aligned, require
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction, OffloadSchedule

SLOTS = ("a", "b", "c")
LIMIT_S = 120


@pytest.fixture
def executor() -> Iterator[ScheduleExecutor]:
    """An action of each kind on each slot; units are called as their slots."""
    actions = tuple(OffloadAction(ActionKey(kind, "x", slot), (slot,)) for kind in ActionKind for slot in SLOTS)
    found = ScheduleExecutor(
        OffloadSchedule(tuple(BufferSlot(slot, 8) for slot in SLOTS), actions),
        HostMemoryPool(3 * 4096),
        torch.device("cpu"),
    )
    yield found
    found.close()


def start(executor: ScheduleExecutor, kind: ActionKind, slot: str, work: Callable[[], object]) -> None:
    executor.compute(ActionKey(kind, "x", slot), work)


@pytest.mark.parametrize("kind", [ActionKind.LOAD, ActionKind.SPILL])
def test_units_come_from_disk_and_go_there_side_by_side(executor: ScheduleExecutor, kind: ActionKind) -> None:
    """Each waits for all: one after the other none would end."""
    together = Barrier(len(SLOTS), timeout=LIMIT_S)
    for slot in SLOTS:
        start(executor, kind, slot, together.wait)
    executor.drain()


@pytest.mark.parametrize("kind", list(ActionKind))
def test_a_slot_has_one_user_at_a_time_in_the_order_in_which_they_were_started(
    executor: ScheduleExecutor, kind: ActionKind
) -> None:
    go, seen = Event(), list[str]()
    start(executor, ActionKind.LOAD, "a", lambda: (go.wait(LIMIT_S), seen.append("first")))
    start(executor, kind, "a", lambda: seen.append("second"))
    start(executor, ActionKind.LOAD, "b", lambda: (seen.append("beside"), go.set()))
    executor.drain()
    assert seen == ["beside", "first", "second"]


def test_actions_that_wait_for_nothing_go_first_and_in_their_order(executor: ScheduleExecutor) -> None:
    """d overtakes b, which waits for a load; b lets c run between its pieces."""
    keys = {slot: ActionKey(ActionKind.COMPUTE, "ahead", slot) for slot in "abcd"}
    actions = tuple(OffloadAction(key, (slot,), order=1 + "cbda".index(slot)) for slot, key in keys.items())
    executor.add((BufferSlot("d", 0, "disk"),), actions, None)
    go, loaded, seen = Event(), Event(), list[str]()

    def pieces() -> None:
        seen.append("b begins")
        executor.compute(keys["c"], lambda: seen.append("c"))
        executor.give_way(keys["b"])
        seen.append("b ends")

    executor.compute(keys["a"], lambda: go.wait(LIMIT_S))
    start(executor, ActionKind.LOAD, "b", lambda: loaded.wait(LIMIT_S))
    executor.compute(keys["b"], pieces)
    executor.compute(keys["d"], lambda: (seen.append("d"), loaded.set()))
    go.set()
    executor.drain()
    assert seen == ["d", "b begins", "c", "b ends"]


def test_without_an_order_actions_run_as_they_were_started(executor: ScheduleExecutor) -> None:
    """Although b waits for a load and c for nothing: both may exchange with other ranks, whose loads end otherwise."""
    loaded, seen = Event(), list[str]()
    keys = {slot: ActionKey(ActionKind.COMPUTE, "in turn", slot) for slot in "bc"}
    executor.add((), tuple(OffloadAction(key, (slot,)) for slot, key in keys.items()), None)
    start(executor, ActionKind.LOAD, "b", lambda: loaded.wait(LIMIT_S))
    executor.compute(keys["b"], lambda: seen.append("b"))
    later = executor.compute(keys["c"], lambda: seen.append("c"))
    assert not later.done()
    loaded.set()
    executor.drain()
    assert seen == ["b", "c"]


def test_work_at_the_same_time_counts_once(executor: ScheduleExecutor) -> None:
    together, never, began = Barrier(len(SLOTS), timeout=LIMIT_S), Event(), time.perf_counter()
    for slot in SLOTS:
        start(executor, ActionKind.LOAD, slot, lambda: (together.wait(), never.wait(0.2)))
    executor.drain()
    assert 0.2 <= executor.take_use()["LOAD"].busy_s <= time.perf_counter() - began


def test_a_wait_counts_for_the_lane_that_was_at_work(executor: ScheduleExecutor) -> None:
    """FETCH waits for the slot, which LOAD fills; COMPUTE was at work before anybody waited."""
    never, waiting = Event(), Event()
    executor.compute(ActionKey(ActionKind.COMPUTE, "x", "a"), lambda: None).result(LIMIT_S)
    start(executor, ActionKind.LOAD, "a", lambda: (waiting.wait(LIMIT_S), never.wait(1.0)))
    start(executor, ActionKind.FETCH, "a", lambda: never.wait(0.05))
    began = time.perf_counter()
    waiting.set()
    executor.wait(ActionKey(ActionKind.FETCH, "x", "a"))
    waited_s = time.perf_counter() - began
    use = executor.take_use()
    assert use["COMPUTE"].waited_s == 0.0
    assert use["LOAD"].waited_s > 0.0
    assert use["FETCH"].waited_s > 0.0
    assert use["LOAD"].waited_s + use["FETCH"].waited_s <= waited_s


def test_what_the_device_waits_for_does_not_queue_behind_updates() -> None:
    keys = [
        ActionKey(kind, what, "0")
        for kind in (ActionKind.LOAD, ActionKind.SPILL)
        for what in ("states", "param", "activation")
    ]
    assert [key.lane for key in keys] == ["LOAD", "LOAD param", "LOAD activation", "SPILL", "SPILL", "SPILL activation"]
    assert {ActionKey(kind, "activation", "0").lane for kind in (ActionKind.EVICT, ActionKind.FETCH)} == {
        "EVICT",
        "FETCH",
    }


def test_names_that_clash_or_do_not_exist_are_refused() -> None:
    key = ActionKey(ActionKind.EVICT, "grad", "root")
    with pytest.raises(ValueError, match=r"EVICT grad root: no slot is called \['nowhere'\]"):
        OffloadSchedule((BufferSlot("a", 1),), (OffloadAction(key, ("nowhere",)),))
    with pytest.raises(ValueError, match="one key"):
        OffloadSchedule((BufferSlot("a", 1),), (OffloadAction(key, ("a",)), OffloadAction(key, ("a",))))


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
