"""Who runs when: lanes and slots of the executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from threading import Barrier, Event

import pytest
import torch

from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction, OffloadSchedule

SLOTS = ("a", "b", "c")
LIMIT_S = 60


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
    never, last = Event(), ActionKey(ActionKind.FETCH, "x", "a")
    start(executor, ActionKind.COMPUTE, "a", lambda: never.wait(0.1))
    start(executor, ActionKind.LOAD, "a", lambda: never.wait(0.3))
    start(executor, ActionKind.FETCH, "a", lambda: never.wait(0.05))
    never.wait(0.15)
    began = time.perf_counter()
    executor.wait(last)
    waited_s = time.perf_counter() - began
    use = executor.take_use()
    assert use["COMPUTE"].waited_s == 0.0
    assert use["LOAD"].waited_s > 2 * use["FETCH"].waited_s > 0.0
    assert use["LOAD"].waited_s + use["FETCH"].waited_s == pytest.approx(waited_s, abs=0.02)
