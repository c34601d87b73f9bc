"""Seats of activations: what is fetched is what was saved, in whatever order, and only what must moves."""

from __future__ import annotations

import errno
import gc
import os
import random
import time
from pathlib import Path

import pytest
import torch

from dzero import DiskConfig, DiskError, OffloadError
from dzero.offload import scratch_dir
from dzero.offload.activation_pool import ActivationPool, ActivationSlot
from dzero.offload.disk import DiskStore
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.schedule import ActionKey, OffloadSchedule

PAGE = 4096


def rooms(path: Path, ahead: int = 1) -> tuple[ActivationPool, ScheduleExecutor, DiskStore]:
    executor = ScheduleExecutor(OffloadSchedule(), HostMemoryPool(0), torch.device("cpu"))
    store = DiskStore(DiskConfig(paths=[str(path)], block_bytes=PAGE), {})
    return ActivationPool(executor, pin=False, store=store, ahead=ahead), executor, store


def save(pool: ActivationPool, source: torch.Tensor) -> ActivationSlot:
    slot = pool.take(source.nbytes)
    pool.evict(slot, source)
    return slot


def fetch(pool: ActivationPool, slot: ActivationSlot, like: torch.Tensor) -> torch.Tensor:
    destination = torch.zeros_like(like)
    pool.fetch(slot, destination)
    pool.stream_wait(slot)
    return destination


def inputs(count: int, elems: int = PAGE) -> list[torch.Tensor]:
    return [torch.full((elems,), float(index)) for index in range(count)]


def moved(executor: ScheduleExecutor) -> dict[str, int]:
    executor.drain()
    return {lane: use.moved_bytes for lane, use in executor.take_use().items()}


@pytest.mark.parametrize("seed", range(8))
def test_whatever_comes_and_goes_in_any_order_comes_back_as_it_was(tmp_path: Path, seed: int) -> None:
    """Saves of several sizes, loads ahead, fetches more than once and drops at random, with delays in all lanes."""
    draw = random.Random(seed)
    chance = random.Random(seed)
    pool, executor, store = rooms(tmp_path, ahead=seed % 3)
    executor.before = lambda key: time.sleep(chance.choice([0.0, 0.0, 0.002]))
    living: list[tuple[ActivationSlot, torch.Tensor]] = []
    for number in range(150):
        doing = draw.choice(["save", "save", "fetch", "load", "drop"])
        if doing == "save" and len(living) < 12:
            source = torch.full((draw.choice([1024, 3000, 5000]),), float(number))
            living.append((save(pool, source.clone()), source))
        elif doing == "load":
            pool.load([slot for slot, _ in draw.sample(living, min(3, len(living)))])
        elif doing == "fetch" and living:
            slot, source = draw.choice(living)
            assert torch.equal(fetch(pool, slot, source), source)
        elif doing == "drop" and living:
            living.pop(draw.randrange(len(living)))
        slot = source = None  # type: ignore[assignment]
    for slot, source in reversed(living):
        assert torch.equal(fetch(pool, slot, source), source)
    use = moved(executor)
    assert use["SPILL activation"] > 0
    assert use["LOAD activation"] > 0
    assert len(pool.turn_bytes) == seed % 3 + 2
    store.close()


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("count", [2, 5, 9])
def test_only_what_has_no_room_goes_to_disk_and_comes_back_once(tmp_path: Path, ahead: int, count: int) -> None:
    pool, executor, store = rooms(tmp_path, ahead)
    for _ in range(2):
        sources = inputs(count)
        activation_slots = [save(pool, source) for source in sources]
        while activation_slots:  # as backward does: one is fetched, and those before it are loaded
            assert torch.equal(
                fetch(pool, activation_slots[-1], sources[len(activation_slots) - 1]),
                sources[len(activation_slots) - 1],
            )
            pool.load(activation_slots[-2 : -2 - ahead : -1])
            activation_slots.pop()
        size, turns = 4 * PAGE, ahead + 2
        use = moved(executor)
        assert use.get("SPILL activation", 0) == max(0, count - turns + 1) * size
        assert use.get("LOAD activation", 0) == max(0, count - turns) * size
        assert pool.host_bytes == min(count, turns) * size
        assert store.striping.file_bytes == (max(0, count - turns + 1) * size,)
    store.close()


def test_what_is_dropped_before_it_had_to_leave_is_never_written(tmp_path: Path) -> None:
    pool, executor, store = rooms(tmp_path)
    for source in inputs(20):
        save(pool, source)
    assert moved(executor).keys() == {"EVICT"}
    assert (len(pool.seat_bytes), store.sizes) == (1, {})
    store.close()


def test_a_host_slot_grows_with_its_seats_and_keeps_what_waits(tmp_path: Path) -> None:
    pool, executor, store = rooms(tmp_path)
    small, large = inputs(4, 1024), inputs(4, 3 * 1024)
    saved = [(save(pool, source), source) for source in [*small, *large]]
    assert pool.host_bytes == executor.schedule.host_bytes == 3 * 3 * PAGE
    assert all(torch.equal(fetch(pool, slot, source), source) for slot, source in saved)
    del saved
    saved = [(save(pool, source), source) for source in inputs(8, 2048)]  # four free seats fit, four are made larger
    assert sorted(pool.seat_bytes.values()) == 4 * [2 * PAGE] + 4 * [3 * PAGE]
    assert all(torch.equal(fetch(pool, slot, source), source) for slot, source in saved)
    store.close()


@pytest.mark.parametrize("kind", ["SPILL", "LOAD"])
def test_a_disk_that_fails_is_told_where_the_activation_is_fetched(tmp_path: Path, kind: str) -> None:
    pool, executor, store = rooms(tmp_path)
    if kind == "SPILL":

        def fail(key: ActionKey) -> None:
            if key.kind == "SPILL" and key.unit == "0":
                raise DiskError(errno.EIO, str(tmp_path), "the cable is out")

        executor.before = fail
    sources = inputs(4)
    activation_slots = [save(pool, source) for source in sources]
    if kind == "LOAD":
        executor.drain()
        block = store.striping.pieces["activation 0, 16384 bytes"][2]
        with open(f"/proc/self/fd/{store.files[0].fd}", "r+b", buffering=0) as stranger:
            os.pwrite(stranger.fileno(), b"scribble", block.offset)
    with pytest.raises(OffloadError, match=f"{kind} activation 0 failed: ") as told:
        fetch(pool, activation_slots[0], sources[0])
    assert isinstance(told.value.__cause__, DiskError)
    assert told.value.__cause__.errno == (errno.EIO if kind == "SPILL" else errno.EBADMSG)


def test_a_full_disk_is_told_by_the_save_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, _, store = rooms(tmp_path)
    first, second = [save(pool, source) for source in inputs(2)]
    monkeypatch.setattr(scratch_dir, "_available", lambda parent: 4 * PAGE - 1)
    with pytest.raises(DiskError, match=r"rank 0 needs 16\.0 KiB of scratch space; 16\.0 KiB are available") as told:
        save(pool, inputs(1)[0])
    assert told.value.errno == errno.ENOSPC
    assert all(
        torch.equal(fetch(pool, slot, want), want) for slot, want in zip((first, second), inputs(2), strict=True)
    )
    store.close()


def test_nothing_is_left_when_nobody_refers_to_it(tmp_path: Path) -> None:
    pool, executor, store = rooms(tmp_path)
    activation_slots = [save(pool, source) for source in inputs(6)]
    executor.drain()
    assert len(os.listdir(tmp_path)) == 1
    del pool, executor, store, activation_slots
    gc.collect()
    deadline = time.monotonic() + 10
    while os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)  # the disk's threads let the file go just after a transfer's end
    assert os.listdir(tmp_path) == []
