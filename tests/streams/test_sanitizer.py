"""The simulation itself: what it must tell, and what it must not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from frames import where_called
from simulation import Simulation

from dzero import streams
from dzero.offload.memory_pool import HostMemoryPool

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
    assert found[0].count("test_sanitizer.py") >= 3  # both accesses, and where the memory was made


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
    assert where_called().startswith("test_sanitizer.py:")
