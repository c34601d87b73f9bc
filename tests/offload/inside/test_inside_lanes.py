"""Who runs when, in lanes and slots; and host memory: never beyond its budget, no slot used twice."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from threading import Barrier, Event

import pytest
import torch

from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HUGE_PAGE_BYTES, HostMemoryPool, require
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
    whats = ("states", "param", "activation")
    lanes = {kind: [ActionKey(kind, what, "0").lane for what in whats] for kind in (ActionKind.LOAD, ActionKind.SPILL)}
    assert lanes[ActionKind.LOAD] == ["LOAD", "LOAD param", "LOAD activation"]
    assert lanes[ActionKind.SPILL] == ["SPILL", "SPILL", "SPILL activation"]


def test_pages_are_touched_once_by_threads_on_the_cores_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    core, bind, mine = max(os.sched_getaffinity(0)), os.sched_setaffinity, os.sched_getaffinity(0)
    bound: list[tuple[int, set[int]]] = []

    def watched(pid: int, cores: list[int]) -> None:
        bind(pid, cores)
        bound.append((threading.get_ident(), os.sched_getaffinity(0)))

    monkeypatch.setattr(os, "sched_setaffinity", watched)
    memory_pool = HostMemoryPool(260 << 20, cores=[core])
    first, _ = memory_pool.lease(130 << 20, "first"), memory_pool.lease(130 << 20, "second")
    assert bound == []
    view = first.view(torch.float32, 8)
    view.fill_(3)
    assert len(bound) == 1
    memory_pool.settle()
    assert len(bound) == 2
    assert view.tolist() == [3] * 8
    memory_pool.settle()
    assert [cores for _, cores in bound] == [{core}] * 2
    assert threading.get_ident() not in {thread for thread, _ in bound}
    assert os.sched_getaffinity(0) == mine


def test_too_little_host_memory_is_told_with_the_sum() -> None:
    require(2 * HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES, ranks=2)
    with pytest.raises(MemoryError, match=r"6\.00 MiB of host memory for each of 2 ranks, 12\.0 MiB in all; 10\.0 MiB"):
        require(3 * HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES, ranks=2)
