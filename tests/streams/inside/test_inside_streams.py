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
import small_decoders
import small_runs
import torch
from frames import where_called
from memory import Space
from pool import Pool
from simulation import Simulation
from training_loops import sharded_net

from dzero import AdamW, streams
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


def write_then_read(wait: Callable[[streams.Stream, streams.Stream], None]) -> None:
    first, second = streams.new_stream(CPU), streams.new_stream(CPU)
    shared = torch.zeros(8)
    streams_wait_for_default(first, second)
    with streams.use_stream(first, CPU):
        shared.add_(1)
        wait(first, second)
    with streams.use_stream(second, CPU):
        shared + 1


def streams_wait_for_default(*others: streams.Stream) -> None:
    for each in others:
        each.wait_stream(streams.current_stream(CPU))


WAITS = {
    "an event": lambda first, second: second.wait_event(first.record_event()),
    "a stream": lambda first, second: second.wait_stream(first),
    "the host": lambda first, second: first.record_event().synchronize(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_orders_two_streams(wait: Callable[[streams.Stream, streams.Stream], None]) -> None:
    assert races(lambda: write_then_read(wait)) == []


def test_without_one_they_race() -> None:
    found = races(lambda: write_then_read(lambda first, second: None))
    assert len(found) == 1
    assert "writes (aten::add_)" in found[0]
    assert "reads (aten::add)" in found[0]
    assert found[0].count("test_inside_streams.py") >= 3  # both accesses, and where the memory was made


def test_an_event_recorded_too_early_orders_nothing_after_it() -> None:
    def program() -> None:
        first, second = streams.new_stream(CPU), streams.new_stream(CPU)
        shared = torch.zeros(8)
        streams_wait_for_default(first, second)
        event = first.record_event()
        with streams.use_stream(first, CPU):
            shared.add_(1)
        second.wait_event(event)
        with streams.use_stream(second, CPU):
            shared + 1

    assert len(races(program)) == 1


def test_two_reads_and_parts_apart_do_not_race() -> None:
    def program() -> None:
        first, second = streams.new_stream(CPU), streams.new_stream(CPU)
        shared = torch.zeros(8)
        streams_wait_for_default(first, second)
        for stream, part in ((first, shared[:4]), (second, shared[4:])):
            with streams.use_stream(stream, CPU):
                part.add_(1)
        streams.synchronize_device(CPU)

    assert races(program) == []


def freed_early(keep: Callable[[torch.Tensor], object]) -> None:
    """Read a tensor on another stream, free it, and write what is made next."""
    other = streams.new_stream(CPU)
    shared = torch.zeros(8)
    streams_wait_for_default(other)
    with streams.use_stream(other, CPU):
        shared + 1
        kept = keep(shared)
    del shared
    torch.zeros(8)
    del kept


def test_memory_that_is_freed_while_another_stream_reads_it_may_be_written() -> None:
    (found,) = races(lambda: freed_early(lambda tensor: None))
    assert "which was what aten::zeros made at" in found


KEPT = {
    "record_stream": streams.record_stream,
    "a reference": lambda tensor: tensor,
    "the host waits": lambda tensor: streams.synchronize(streams.record_event(CPU)),
}


@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_it_is_not_where_somebody_keeps_it(keep: Callable[[torch.Tensor], object]) -> None:
    assert races(lambda: freed_early(keep)) == []


def test_memory_made_on_one_stream_is_not_used_on_another_at_once() -> None:
    """What was freed there may still be in use; here something was."""

    def program() -> None:
        other = streams.new_stream(CPU)
        torch.zeros(8).add_(1)
        made = torch.empty(8)
        with streams.use_stream(other, CPU):
            made.zero_()

    assert len(races(program)) == 1


def test_loans_are_waited_for_one_later() -> None:
    def lent(loans: bool) -> list[str]:
        def program() -> None:
            home, reader, kept = streams.new_stream(CPU), streams.new_stream(CPU), streams.Loans(CPU)
            for _ in range(4):
                with streams.use_stream(home, CPU):
                    kept.make()
                    made = torch.ones(8)
                reader.wait_stream(home)
                with streams.use_stream(reader, CPU):
                    made + 1
                    if loans:
                        kept.lend(made)
                del made

        return races(program)

    assert lent(loans=True) == []
    assert lent(loans=False) != []


def test_a_pools_task_comes_after_what_was_done_before_it_and_its_result_after_it() -> None:
    def program(takes: bool) -> None:
        memory_pool = HostMemoryPool(4096)
        shared = memory_pool.lease(4096, "shared").view(torch.float32, 8)
        with ThreadPoolExecutor(1) as pool:
            shared.add_(1)
            future = pool.submit(shared.add_, 1)
            while not future.done():
                pass
            if takes:
                future.result()
            shared.add_(1)

    assert races(lambda: program(takes=True)) == []
    assert len(races(lambda: program(takes=False))) == 1  # it was seen to be done, which proves nothing here


def test_a_copy_to_the_host_that_does_not_block_is_waited_for() -> None:
    def program(blocks: bool) -> None:
        there = HostMemoryPool(4096).lease(4096, "there").view(torch.float32, 8)
        here = torch.ones(8)
        there.copy_(here, non_blocking=not blocks)
        there.mul_(2)

    assert races(lambda: program(blocks=True)) == []
    assert len(races(lambda: program(blocks=False))) == 1


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


def keep_counts_on_the_host(simulation: Simulation, optimizer: Any) -> None:
    """Put the numbers of steps where they are beside a GPU, too."""
    for states in optimizer.state.values():
        counts = simulation.block_of(states["step"])
        assert counts is not None
        counts.space = Space.HOST


def stops(rank: int, ranks: int, net: dict[str, Any]) -> list[list[str]]:
    """Return what the host waited for in each of three steps."""
    told = []
    with Simulation().running() as simulation:
        sharded = sharded_net(**net)
        optimizer = AdamW(sharded, lr=1e-3, max_norm=1.0)
        keep_counts_on_the_host(simulation, optimizer)
        drawn = small_decoders.batches("even", steps=3, ranks=ranks, microbatches=sharded.layout.microbatches)
        for of_step in drawn:
            simulation.stops.clear()
            for index, batch in enumerate(of_step[rank]):
                with sharded.microbatch(is_last=index == len(of_step[rank]) - 1):
                    small_decoders.loss_fn(sharded.model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            told.append([*simulation.stops])
    return told


class Watched(Trainer):
    """A trainer that notes what the host waited for in each step."""

    simulation: Simulation
    told: list[list[str]]

    def step(self, *args: Any, **more: Any) -> Any:
        self.simulation.stops.clear()
        shared = super().step(*args, **more)
        self.told.append([*self.simulation.stops])
        return shared


def stops_of_trainer(rank: int, ranks: int, folder: Path) -> list[list[str]]:
    """Return what the host waited for in each step of train.py but the first, which asks more."""
    text = small_runs.write_text(folder / f"text_{rank}.txt", words=2000)
    words = (f"launch.workers={ranks}", "train.steps=4", "train.evaluate_batches=0")
    run = small_runs.settled(text, *words)
    with Simulation().running() as simulation:
        trainer = Watched(run, folder, CPU)
        trainer.simulation, trainer.told = simulation, []
        keep_counts_on_the_host(simulation, trainer.optim)
        trainer.run()
    return trainer.told[1:]


def stops_once(of_ranks: list[list[list[str]]]) -> None:
    """Assert that each step but the first waits where all ranks decide what becomes of the gradients, only there."""
    for of_rank in of_ranks:
        assert len(of_rank) > 1
        for of_step in of_rank[1:]:
            assert len(of_step) == 1, "\n".join(of_step)
            assert "dzero/optim/grad_norm.py" in of_step[0]


@pytest.mark.full("tests/streams/inside/test_inside_streams.py::test_a_step_of_the_trainer_stops_the_host_once")
@pytest.mark.parametrize(
    "net",
    [{"stage": 2}, {"stage": 3, "microbatches": 2}, {"stage": 0, "reduction": "native"}],
    ids=["stage 2", "stage 3, M=2", "native, stage 0"],
)
def test_a_step_stops_the_host_once(pool: Pool, net: dict[str, Any]) -> None:
    stops_once(pool.run(stops, 2, net))


def test_a_step_of_the_trainer_stops_the_host_once(pool: Pool, tmp_path: Path) -> None:
    stops_once(pool.run(stops_of_trainer, 2, tmp_path))
