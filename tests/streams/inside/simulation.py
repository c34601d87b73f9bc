"""Streams that a CPU lacks, and who waits for whom: FSDP2's and dzero's own code runs on them as on a GPU.

    patched                       to
    torch.cpu's streams           simulated ones: FSDP2 takes its streams from `torch.<device type>`
    dzero.streams.device_module   the same for what dzero does
    every operator of torch       a dispatch mode notes which bytes it reads and writes, on which stream or thread
    what torch does not see       kernels that take addresses, disks, `resize_`, `record_stream`: wrapped (kernels.py)
    collectives                   run on a communication stream of their group; `Work.wait` lets the current stream wait
    pools of threads              a task comes after what its submitter did; who takes a result comes after the task

Operators run at once and in order, so numbers are right whatever is missing; what would be wrong on a GPU is told by
clocks alone (memory.py), whatever the timing. Which operators run where:

    all operands in host memory   in the thread that calls, at once
    else                          on the thread's current stream, which knows what the thread knows when it enqueues
    copies across, blocking       the same, and the thread waits for the stream

What it cannot see: races between ranks; locks and queues between threads of one rank (only pools and futures are
followed, so more is told than is wrong); memory of a stream's own that an operator uses inside; what cannot be reached
on a CPU, as the Triton kernels. A future that was seen to be done proves what its thread did, and nothing more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from memory import Access, Agent, Block, Clock, Memory, Race, Space, extent
from sites import Site, site_of_caller, where_called


class SimulatedStream(Agent):
    """A stream, with the methods that FSDP2 and dzero call. Whatever a thread enqueues comes after what it knows."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        super().__init__(name)
        self.simulation = simulation

    def wait_event(self, event: SimulatedEvent) -> None:
        self.simulation.order(self, event.clock)

    def wait_stream(self, stream: SimulatedStream) -> None:
        self.simulation.order(self, stream.now())

    def record_event(self, event: SimulatedEvent | None = None) -> SimulatedEvent:
        event = event or SimulatedEvent(self.simulation)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.simulation.order(self.simulation.thread, self.now())


class SimulatedEvent:
    """A moment of a stream."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.clock = simulation, Clock()

    def record(self, stream: SimulatedStream | None = None) -> None:
        stream = stream or self.simulation.current
        if not self.simulation.is_skipped("record"):
            stream.join(self.simulation.thread.clock)
            self.clock = stream.now()

    def synchronize(self) -> None:
        if not self.simulation.thread.knows(self.clock):
            self.simulation.stops.append(f"synchronize at {where_called()}")
        self.simulation.order(self.simulation.thread, self.clock)

    def wait(self, stream: SimulatedStream | None = None) -> None:
        self.simulation.order(stream or self.simulation.current, self.clock)

    def query(self) -> bool:
        return True


OF_CPU = ("Stream", "Event", "current_stream", "stream")
"""What FSDP2 takes from `torch.cpu`."""


class OfThread(threading.local):
    """What each thread has of its own."""

    stream: SimulatedStream | None = None
    in_pool, is_muted = False, False

    def __init__(self) -> None:
        self.agent = Agent(f"thread {threading.current_thread().name}")


class Simulation:
    """One rank's streams, threads and memory while `running`.

    `races` are what was found, `stops` what made a thread wait for a stream: results that the host reads, and copies
    that block. without: a wait, a record or a held reference in dzero/ that is left out, to see whether that is
    noticed.
    """

    _now: Simulation | None = None

    @classmethod
    def now(cls) -> Simulation:
        assert cls._now is not None
        return cls._now

    def __init__(self, without: Site | None = None) -> None:
        self.races: dict[tuple[str, str], Race] = {}
        self.lock = threading.RLock()
        self.memory = Memory(self._found)
        self.without, self.sites = without, set[Site]()
        self.default = SimulatedStream(self, "the default stream")
        self.of_thread = OfThread()
        self._communication: dict[str, SimulatedStream] = {}
        self._made: list[SimulatedStream] = []
        self.stops: list[str] = []
        self._results: dict[int, tuple[Clock, list[torch.Tensor]]] = {}

    # Who

    @property
    def thread(self) -> Agent:
        return self.of_thread.agent

    @property
    def current(self) -> SimulatedStream:
        return self.of_thread.stream or self.default

    def clock_of_thread(self) -> Clock:
        return self.thread.now()

    def communication(self, group: str) -> SimulatedStream:
        """Return the stream on which a group's collectives run that are not waited for."""
        if group not in self._communication:
            self._communication[group] = SimulatedStream(self, f"the communication stream of group {group}")
        return self._communication[group]

    # Waits

    def is_skipped(self, kind: str) -> bool:
        if self.of_thread.is_muted:
            return True
        site = site_of_caller(kind)
        if site is not None:
            self.sites.add(site)
        return site is not None and site == self.without

    def leaves_out(self, kind: str) -> bool:
        """Return whether the call that led here is the one that is left out; it is another's, which waits by itself."""
        site = site_of_caller(kind)
        return site is not None and site == self.without

    def muted(self, yes: bool) -> AbstractContextManager[Any]:
        """Leave out every wait inside, of this thread."""
        return mock.patch.object(self.of_thread, "is_muted", yes or self.of_thread.is_muted)

    def order(self, agent: Agent, after: Clock, kind: str = "wait") -> None:
        """Let an agent wait, unless this wait is left out."""
        with self.lock:
            if not self.is_skipped(kind):
                if isinstance(agent, SimulatedStream):
                    agent.join(self.thread.clock)
                agent.join(after)

    # Accesses

    def run(
        self,
        what: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        *,
        on: SimulatedStream | None = None,
        blocks: bool = False,
    ) -> None:
        """Note one operation on the current stream, or on `on`; in the thread itself where all memory is the host's.

        blocks: the thread waits for its end.
        """
        with self.lock:
            touched = [
                (tensor, block, is_write)
                for tensors, is_write in ((reads, False), (writes, True))
                for tensor in tensors
                if (block := self.memory.block_of(tensor, self.clock_of_thread)) is not None
            ]
            is_here = on is None and not any(block.space is Space.DEVICE for _, block, _ in touched)
            thread, stream = self.thread, on or self.current
            where = where_called()
            agent: Agent = thread if is_here else stream
            if not is_here:
                stream.join(thread.clock)
            count = agent.tick()
            thread_count = None
            for tensor, block, is_write in touched:
                by, number = agent, count
                if not is_here and block.space is Space.HOST:  # staged by the call itself, before it returns
                    thread_count = thread.tick() if thread_count is None else thread_count
                    by, number = thread, thread_count
                    blocks = blocks or is_write
                start, end = extent(tensor)
                self.memory.touch(block, Access(by, number, start, end, is_write, what, where), by.clock)
            if blocks and not is_here:
                self.stops.append(f"{what} at {where}")
                thread.join(stream.clock)

    def made(self, storage: torch.UntypedStorage, space: Space, what: str) -> None:
        with self.lock:
            self.current.join(self.thread.clock)
            name = f"what {what} made at {where_called()}"
            self.memory.bear(storage, space, self.current, name, self.clock_of_thread)

    def space_of(self, tensor: torch.Tensor) -> Space | None:
        with self.lock:
            block = self.memory.block_of(tensor, self.clock_of_thread)
        return None if block is None else block.space

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        return self.memory.block_of(tensor, self.clock_of_thread)

    def start_result(
        self,
        what: str,
        group: str,
        reads: list[torch.Tensor],
        writes: list[torch.Tensor],
        fresh: list[torch.Tensor],
    ) -> None:
        """Note a functional collective, and keep its end for who waits for one of its results, as nccl's work keeps
        what it reads until then."""
        stream = self.communication(group)
        with self.lock:
            stream.join(self.current.clock)
            self.run(what, reads, writes + fresh, on=stream)
            for each in writes + fresh:
                self._results[each.untyped_storage().data_ptr()] = stream.now(), reads

    def wait_for_result(self, tensor: torch.Tensor) -> None:
        """Let the current stream wait for a functional collective."""
        known, _ = self._results.pop(tensor.untyped_storage().data_ptr(), ({}, []))
        self.order(self.current, known)

    def _found(self, race: Race) -> None:
        self.races.setdefault((race.earlier.where, race.later.where), race)

    # What FSDP2 and dzero see

    def make_stream(self, priority: int = 0, device: object = None) -> SimulatedStream:
        del priority, device
        stream = SimulatedStream(self, f"stream {len(self._made) + 1} ({where_called()})")
        self._made.append(stream)
        return stream

    def use(self, stream: SimulatedStream | None) -> AbstractContextManager[Any]:
        return mock.patch.object(self.of_thread, "stream", stream or self.current)

    def synchronize(self) -> None:
        for stream in (self.default, *self._communication.values(), *self._made):
            self.order(self.thread, stream.now())

    @contextmanager
    def running(self) -> Iterator[Simulation]:
        """Let this thread, and the pools it starts, run on simulated streams."""
        import kernels
        from operators import Operators

        class Module:
            """What `torch.cuda` has, for dzero/streams.py."""

            Stream = staticmethod(self.make_stream)
            Event = staticmethod(lambda blocking=False: SimulatedEvent(self))
            current_stream = staticmethod(lambda device=None: self.current)
            empty_cache = staticmethod(lambda: None)
            stream = staticmethod(self.use)
            set_device = staticmethod(lambda device: None)
            current_device = staticmethod(lambda: 0)
            synchronize = staticmethod(lambda device=None: self.synchronize())

        patches: list[Any] = [
            *(mock.patch.object(torch.cpu, each, getattr(Module, each)) for each in OF_CPU),
            *kernels.patches(self, Module),
        ]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(Simulation, "_now", self))
            for patch in patches:
                stack.enter_context(patch)
            stack.enter_context(Operators(self))
            yield self
