"""Allocations and frees of simulated steps, in order, and their replay in a model of the allocator.

The recorder is a `StorageMeter`, so that it sees what the meter counts: storages of fake tensors, at the sizes of a
real run. It does not see temporaries inside operators, nor workspaces of libraries. It looks at resized storages before
each operator too, because what FSDP2 frees between two operators is free for the result of the second one. The streams
are those that FSDP2 allocates on: its own for what it gathers into and for reduced gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from simulator.caching_allocator import MIN_BLOCK, Block, CachingAllocator, OutOfMemory, round_up
from simulator.observe import Loss, Passes, run_steps
from simulator.scenario import Scenario
from simulator.simulate import simulated_mesh, simulated_rank
from simulator.storage_meter import Held, StorageMeter, Where

ARENA = "arena"
"""Kind of an allocation that holds others."""


@dataclass(eq=False)
class Allocation:
    """Memory of a storage from its allocation, at `born`, until it is freed, at `died`, or until the end."""

    bytes: int
    stream: str
    born: Where
    kind: str
    died: Where | None = None


class Event(NamedTuple):
    """Allocation, or its end."""

    allocation: Allocation
    freed: bool


@dataclass(frozen=True)
class Trace:
    """Events in order.

    Attributes:
        made: Number of events before the first step, which make the model and its states.
    """

    events: list[Event]
    made: int

    @property
    def peak(self) -> int:
        """Maximum of the bytes that are allocated at once."""
        live = peak = 0
        for allocation, freed in self.events:
            live += -allocation.bytes if freed else allocation.bytes
            peak = max(peak, live)
        return peak


def record(scenario: Scenario, steps: Sequence[Sequence[int]]) -> Trace:
    """Record steps of rank 0.

    Args:
        scenario: The run; its `tokens` are not used.
        steps: Tokens of the sequences of each microbatch of each step.
    """
    recorder = _Recorder()
    streams = patch.object(torch.cpu, "stream", recorder.on)
    with simulated_mesh(scenario) as mesh, streams, simulated_rank(scenario, mesh, recorder) as rank:

        def loss_of(tokens: int) -> Loss:
            return partial(replace(scenario, tokens=tokens).loss_of(rank.sharded.model), None)

        passes = [Passes.each([loss_of(tokens) for tokens in step]) for step in steps]
        run_steps(rank.sharded, rank.optim, passes, recorder)
        return recorder.trace()


def is_activation(allocation: Allocation) -> bool:
    """Return whether a unit's forward made it for backward: what it saves, or the input of the next unit."""
    born, died = allocation.born, allocation.died
    kept = died is not None and (born.phase, died.phase) == ("forward", "backward")
    return kept and allocation.kind == "activations" and born.unit != ""


def is_reduced_grad(allocation: Allocation) -> bool:
    """Return whether it is a gradient that lives from its reduction until the update."""
    born, died = allocation.born, allocation.died
    return allocation.kind == "grad" and died is not None and (born.phase, died.phase) == ("backward", "step")


def with_arena(trace: Trace, chosen: Callable[[Allocation], bool]) -> Trace:
    """Return the trace with one allocation before the first step that holds all `chosen` ones.

    The arena is filled from its start and emptied as a whole, when none of the chosen is alive. It is as large as the
    fullest step needs, which a run would have to know before.
    """
    inside = [event for event in trace.events if chosen(event.allocation)]
    alive = used = most = 0
    for allocation, freed in inside:
        alive += -1 if freed else 1
        used = 0 if alive == 0 else used if freed else used + round_up(allocation.bytes, MIN_BLOCK)
        most = max(most, used)
    arena = Event(Allocation(most, "", Where(0, "", ""), ARENA), freed=False)
    before, steps = trace.events[: trace.made], trace.events[trace.made :]
    return Trace([*before, arena, *(event for event in steps if not chosen(event.allocation))], trace.made + 1)


def replay(trace: Trace, *, expandable: bool, capacity: int | None = None) -> CachingAllocator:
    """Replay a trace on a device of `capacity` bytes and return its allocator; raises OutOfMemory."""
    allocator = CachingAllocator(capacity, expandable=expandable)
    blocks: dict[Allocation, Block] = {}
    for allocation, freed in trace.events:
        if freed:
            allocator.free(blocks.pop(allocation))
        else:
            blocks[allocation] = allocator.malloc(allocation.bytes, allocation.stream)
    return allocator


def smallest_device(trace: Trace, *, expandable: bool, step: int) -> tuple[int, int]:
    """Return the fewest bytes of a device on which the trace succeeds, and how often memory is given back there.

    The size is found by bisection to `step` bytes, as if no smaller device succeeded where a larger one fails.
    """
    fails, succeeds, retries = trace.peak - 1, replay(trace, expandable=expandable).peak_reserved, 0
    while succeeds - fails > step:
        tried = (fails + succeeds) // 2
        try:
            retries = replay(trace, expandable=expandable, capacity=tried).retries
        except OutOfMemory:
            fails = tried
        else:
            succeeds = tried
    return succeeds, retries


class _Recorder(StorageMeter):  # type: ignore[no-untyped-call]
    """Meter that keeps every change of a storage's size."""

    def __init__(self) -> None:
        super().__init__()
        self._stream = ""
        self._streams: dict[int, str] = {}
        self._live: dict[Held, Allocation] = {}
        self._made: list[tuple[Allocation, Held]] = []
        self._events: list[Event] = []
        self._first: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._look_at_sizes()
        return super().__torch_dispatch__(func, types, args, kwargs)

    @contextmanager
    def on(self, stream: object) -> Iterator[None]:
        """Let allocations be on a stream of FSDP2, in place of `torch.cpu.stream`, which does nothing."""
        before, self._stream = self._stream, self._streams.setdefault(id(stream), f"{len(self._streams) + 1}")
        try:
            yield
        finally:
            self._stream = before

    def begin(self) -> None:
        super().begin()
        if self._first is None:
            self._first = len(self._events)

    def trace(self) -> Trace:
        """Return what was recorded; the kind of an allocation is the last that was determined."""
        for allocation, held in self._made:
            allocation.kind = held.kind
        return Trace(self._events, self._first or 0)

    def _change(self, held: Held, count: int) -> None:
        if count == held.count:
            return
        super()._change(held, count)
        if (ended := self._live.pop(held, None)) is not None:
            ended.died = self.where
            self._events.append(Event(ended, True))
        if count > 0:
            made = self._live[held] = Allocation(count, self._stream, self.where, held.kind)
            self._made.append((made, held))
            self._events.append(Event(made, False))
