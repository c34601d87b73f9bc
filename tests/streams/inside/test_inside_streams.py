"""On simulated streams: what the simulation must tell and what not, whose device threads use, what stops the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import small_runs
import torch
from memory import Space
from pool import Pool
from simulation import Simulation
from sites import where_called

from dzero import streams
from dzero.data.prefetch import BatchPrefetcher
from dzero.data.sequences import TextSequences
from dzero.data.stream import SequenceStream
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.schedule import ActionKey, ActionKind, BufferSlot, OffloadAction, OffloadSchedule
from dzero.trainer.trainer import Trainer

CPU = torch.device("cpu")


def races(program: Callable[[], object]) -> list[str]:
    """Run `program` on simulated streams; return what was found."""
    with Simulation().running() as simulation:
        program()
    return [str(race) for race in simulation.races.values()]


def shared_by_two() -> tuple[torch.Tensor, streams.Stream, streams.Stream]:
    """Memory, and two streams that come after it."""
    shared, first, second = torch.zeros(8), streams.new_stream(CPU), streams.new_stream(CPU)
    for each in (first, second):
        each.wait_stream(streams.current_stream(CPU))
    return shared, first, second


def write_then_read(wait: Callable[..., None]) -> None:
    """On two streams; `wait(first, second, early)`: in between, `early` is an event from before the write."""
    shared, first, second = shared_by_two()
    early = first.record_event()
    with streams.use_stream(first, CPU):
        shared.add_(1)
        wait(first, second, early)
    with streams.use_stream(second, CPU):
        shared + 1


WAITS: dict[str, tuple[Callable[..., None], int]] = {
    "an event": (lambda first, second, early: second.wait_event(first.record_event()), 0),
    "a stream": (lambda first, second, early: second.wait_stream(first), 0),
    "the host": (lambda first, second, early: first.record_event().synchronize(), 0),
    "nothing": (lambda first, second, early: None, 1),
    "an event recorded too early": (lambda first, second, early: second.wait_event(early), 1),
}


@pytest.mark.parametrize(("wait", "count"), WAITS.values(), ids=WAITS)
def test_two_streams_race_unless_one_waits_for_the_other(wait: Callable[..., None], count: int) -> None:
    found = races(lambda: write_then_read(wait))
    assert len(found) == count
    for race in found:
        assert "writes (aten::add_)" in race
        assert "reads (aten::add)" in race
        assert race.count("test_inside_streams.py") >= 3  # both accesses, and where the memory was made


def test_two_parts_of_a_tensor_do_not_race() -> None:
    def program() -> None:
        shared, first, second = shared_by_two()
        for stream, part in ((first, shared[:4]), (second, shared[4:])):
            with streams.use_stream(stream, CPU):
                part.add_(1)
        streams.synchronize_device(CPU)

    assert races(program) == []


def freed_early(keep: Callable[[torch.Tensor], object]) -> None:
    """Read a tensor on another stream, free it, and write what is made next."""
    shared, other, _ = shared_by_two()
    with streams.use_stream(other, CPU):
        shared + 1
        kept = keep(shared)
    del shared
    torch.zeros(8)
    del kept


KEPT: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "nothing": (lambda tensor: None, 1),
    "record_stream": (streams.record_stream, 0),
    "a reference": (lambda tensor: tensor, 0),
    "the host waits": (lambda tensor: streams.synchronize(streams.record_event(CPU)), 0),
}


@pytest.mark.parametrize(("keep", "count"), KEPT.values(), ids=KEPT)
def test_memory_that_is_freed_while_another_stream_reads_it_may_be_written_unless_somebody_keeps_it(
    keep: Callable[[torch.Tensor], object], count: int
) -> None:
    found = races(lambda: freed_early(keep))
    assert ["which was what aten::zeros made at" in race for race in found] == [True] * count


def test_memory_made_on_one_stream_is_not_used_on_another_at_once() -> None:
    """What was freed there may still be in use; here something was."""

    def program() -> None:
        other = streams.new_stream(CPU)
        torch.zeros(8).add_(1)
        made = torch.empty(8)
        with streams.use_stream(other, CPU):
            made.zero_()

    assert len(races(program)) == 1


@pytest.mark.parametrize("lends", [True, False])
def test_loans_are_waited_for_one_later(lends: bool) -> None:
    def program() -> None:
        home, reader, kept = streams.new_stream(CPU), streams.new_stream(CPU), streams.Loans(CPU)
        for _ in range(4):
            with streams.use_stream(home, CPU):
                kept.make()
                made = torch.ones(8)
            reader.wait_stream(home)
            with streams.use_stream(reader, CPU):
                made + 1
                if lends:
                    kept.lend(made)
            del made

    assert (races(program) == []) == lends


@pytest.mark.parametrize("takes", [True, False])
def test_a_pools_task_comes_after_what_was_done_before_it_and_its_result_after_it(takes: bool) -> None:
    """One whose result nobody takes was seen to be done, which proves nothing here."""

    def program() -> None:
        shared = HostMemoryPool(4096).lease(4096, "shared").view(torch.float32, 8)
        with ThreadPoolExecutor(1) as pool:
            shared.add_(1)
            future = pool.submit(shared.add_, 1)
            while not future.done():
                pass
            if takes:
                future.result()
            shared.add_(1)

    assert len(races(program)) == (not takes)


@pytest.mark.parametrize("blocks", [True, False])
def test_a_copy_to_the_host_that_does_not_block_is_waited_for(blocks: bool) -> None:
    def program() -> None:
        there = HostMemoryPool(4096).lease(4096, "there").view(torch.float32, 8)
        there.copy_(torch.ones(8), non_blocking=not blocks)
        there.mul_(2)

    assert len(races(program)) == (not blocks)


def test_lines_are_told_from_the_innermost() -> None:
    assert where_called().startswith("test_inside_streams.py:")


def stream() -> SequenceStream:
    return SequenceStream(TextSequences(np.arange(200), 7), microbatch_sequences=2, rank=1, ranks=2, seed=3)


def test_microbatches_copied_ahead_are_those_of_the_stream_also_where_it_is_set_back() -> None:
    plain, read = stream(), stream()
    with Simulation().running() as simulation:
        ahead = BatchPrefetcher(read, CPU)
        assert read.samples == 0
        for step in range(8):
            if step == 5:
                for each in (plain, read):
                    each.load_state_dict({**each.state_dict(), "epoch": 0, "position": 4})
            assert all(map(torch.equal, ahead.next()[:2], plain.next()[:2]))
            assert read.state_dict() == plain.state_dict()
    assert [str(race) for race in simulation.races.values()] == []


def test_without_streams_no_microbatch_is_read_ahead() -> None:
    plain, read = stream(), stream()
    with mock.patch.object(read, "peek", wraps=read.peek) as looked:
        assert all(map(torch.equal, BatchPrefetcher(read, CPU).next()[:2], plain.next()[:2]))
    assert looked.call_count == 1


def test_every_lane_uses_the_device_of_its_rank() -> None:
    """Also one that was opened later, and before it does anything: a new thread of CUDA's uses the first device."""
    chosen: dict[str, torch.device] = {}
    worked: list[str] = []

    def set_device(device: torch.device) -> None:
        chosen[threading.current_thread().name] = device

    keys = [ActionKey(kind, "work", "unit") for kind in ActionKind]
    actions = tuple(OffloadAction(key, ("slot",)) for key in keys)
    with Simulation().running(), mock.patch.object(streams, "set_device", set_device):
        schedule = OffloadSchedule((BufferSlot("slot", 4096),), actions[:2])
        executor = ScheduleExecutor(schedule, HostMemoryPool(4096), CPU)
        executor.add((), actions[2:], None)
        futures: list[Future[None]] = [
            executor.compute(key, lambda: worked.append(threading.current_thread().name)) for key in keys
        ]
        wait(futures)
        executor.close()
    assert len(set(worked)) == len(keys)
    assert {name: chosen.get(name) for name in worked} == dict.fromkeys(worked, torch.device("cpu", 0))


class Watched(Trainer):
    """A trainer that notes what the host waited for in each step."""

    simulation: Simulation
    told: list[list[str]]

    def step(self, *args: Any, **more: Any) -> Any:
        self.simulation.stops.clear()
        shared = super().step(*args, **more)
        self.told.append([*self.simulation.stops])
        return shared


def stops(rank: int, ranks: int, words: tuple[str, ...], folder: Path) -> list[list[str]]:
    """What the host waited for in each step of train.py but the first, which asks more."""
    text = small_runs.write_text(folder / f"text_{rank}.txt", words=2000)
    run = small_runs.settled(text, f"launch.workers={ranks}", "train.steps=4", "train.evaluate_batches=0", *words)
    with Simulation().running() as simulation:
        trainer = Watched(run, folder, CPU)
        trainer.simulation, trainer.told = simulation, []
        for states in trainer.optim.state.values():  # numbers of steps are on the host beside a GPU, too
            counts = simulation.block_of(states["step"])
            assert counts is not None
            counts.space = Space.HOST
        trainer.run()
    return trainer.told[1:]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    "words",
    [("zero.stage=2",), ("zero.stage=3", "train.accumulate=2"), ("zero.stage=0", "zero.reduction=native")],
    ids=" ".join,
)
def test_a_step_stops_the_host_once(pool: Pool, tmp_path: Path, words: tuple[str, ...]) -> None:
    """Where all ranks decide what becomes of the gradients, and only there."""
    for of_rank in pool.run(stops, 2, words, tmp_path):
        assert len(of_rank) > 1
        for of_step in of_rank[1:]:
            assert len(of_step) == 1, "\n".join(of_step)
            assert "dzero/optim/grad_norm.py" in of_step[0]
