"""What a simulation patches beside streams: what touches memory, or orders threads, without an operator of torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import wraps
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from memory import Access, Agent, Space
from operators import Operators, tensors_of
from simulation import SimulatedStream, Simulation
from sites import where_called

from dzero import AdamW, streams
from dzero.comm import host_sum, reduction
from dzero.offload.disk_transfer import PieceTransfer
from dzero.offload.executor import ScheduleExecutor
from dzero.offload.lane import Lane
from dzero.offload.memory_pool import HostMemoryPool, Lease
from dzero.optim import cpu_kernels
from dzero.optim.flat_update import AdamWUpdater
from dzero.zero.unit import Unit

GATHERS = "allgather _allgather_base all_gather_single allgather_into_tensor_coalesced"
SCATTERS = "reduce_scatter _reduce_scatter_base reduce_scatter_single alltoall_base all_to_all_single alltoall"
COLLECTIVES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("allreduce", "broadcast"), ((0,), (0,))),
    **dict.fromkeys((*GATHERS.split(), *SCATTERS.split()), ((0,), (1,))),
    "send": ((), (0,)),
    "recv": ((0,), ()),
}
"""Name: indices of what is written, of what is read."""


class SimulatedWork(dist.Work):
    """A collective on its group's communication stream.

    As with nccl it holds its tensors until it is waited for, which lets the current stream wait, not the host.
    """

    def __init__(self, simulation: Simulation, real: Any, stream: SimulatedStream | None, held: list[Any]) -> None:
        super().__init__()
        self._simulation, self._real, self._held = simulation, real, held
        self._clock = None if stream is None else stream.now()

    def wait(self, timeout: object = None) -> bool:
        if self._real is not None:
            self._real.wait()
        if self._clock is not None:
            self._simulation.order(self._simulation.current, self._clock)
        self._held = []
        return True

    def is_completed(self) -> bool:
        return bool(self._real is None or self._real.is_completed())


def patches(simulation: Simulation, module: type) -> list[Any]:
    """Return the patches, to be entered before the run. module: what `torch.cuda` is on CUDA, for dzero/streams.py."""
    return [
        mock.patch.object(streams, "device_module", lambda device: module if device.type == "cpu" else None),
        *_memory(simulation),
        *_kernels(simulation),
        *_collectives(simulation),
        *_threads(simulation),
    ]


def _memory(simulation: Simulation) -> list[Any]:
    synchronize, lend, release = streams.synchronize, streams.Loans.lend, Lease.release

    def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        copy = tensor.clone()
        if (block := simulation.block_of(copy)) is not None:
            block.space, block.stream, block.history = Space.PINNED, None, []  # its allocator waits for copies itself
        return copy

    def lent(self: streams.Loans, tensor: torch.Tensor) -> None:
        if not simulation.is_skipped("hold"):
            lend(self, tensor)

    def synchronized(event: Any, holding: Any = ()) -> None:
        held = [simulation.block_of(tensor) for tensor in holding]
        synchronize(event)
        for block in held:
            if block is not None and not simulation.is_skipped("hold"):
                agent = Agent("those who let go", block.let_go)
                agent.join(simulation.thread.clock)

    resize, init = torch.UntypedStorage.resize_, HostMemoryPool.__init__
    to_list, to_cpu = torch.Tensor.tolist, torch.Tensor.cpu

    def resized(storage: torch.UntypedStorage, count: int) -> Any:
        with simulation.lock:
            simulation.memory.free(storage, simulation.clock_of_thread)
            out = resize(storage, count)
            if count:
                simulation.made(storage, Space.DEVICE, "resize_")
        return out

    def record_stream(tensor: torch.Tensor, stream: SimulatedStream) -> None:
        block = simulation.block_of(tensor)
        if not simulation.is_skipped("record_stream") and block is not None:
            block.recorded.add(stream)

    def waited(read: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
        @wraps(read)
        def waits(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if type(tensor) is not torch.Tensor:
                return read(tensor, *args, **kwargs)
            was_there = simulation.space_of(tensor) in (Space.DEVICE, None)
            simulation.run("a copy to the host", [tensor], [], blocks=True)
            if read is not to_cpu or not was_there:
                return read(tensor, *args, **kwargs)
            copy = tensor.detach().clone()
            if (block := simulation.block_of(copy)) is not None:
                block.space, block.stream, block.history = Space.HOST, None, []
            return copy

        return waits

    def released(self: Lease) -> None:
        with simulation.lock:
            thread, start = simulation.thread, self.data.data_ptr()
            access = Access(thread, thread.tick(), 0, 0, True, "given back", where_called())
            simulation.memory.give_back(start, start + self.data.nbytes, access, thread.clock)
        release(self)

    def memory_pool(self: HostMemoryPool, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if self._memory.numel():
            simulation.memory.add_pool(self._memory.data_ptr(), self._memory.numel())

    return [
        mock.patch.object(streams, "synchronize", synchronized),
        mock.patch.object(streams, "pin_memory", pinned),
        mock.patch.object(streams.Loans, "lend", lent),
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(torch.Tensor, "record_stream", record_stream),
        mock.patch.object(torch.Tensor, "tolist", waited(to_list)),
        mock.patch.object(torch.Tensor, "cpu", waited(to_cpu)),
        mock.patch.object(HostMemoryPool, "__init__", memory_pool),
        mock.patch.object(Lease, "release", released),
    ]


def _kernels(simulation: Simulation) -> list[Any]:
    accumulate, sum_squares, average = cpu_kernels.accumulate, cpu_kernels.sum_squares, host_sum.average
    update, transfer = AdamWUpdater._update, PieceTransfer.run

    def accumulated(accs: Any, grads: Any) -> torch.Tensor:
        simulation.run("accumulate", [*grads], [*accs])
        return accumulate(accs, grads)

    def summed(grads: Any) -> torch.Tensor:
        simulation.run("sum_squares", [*grads], [])
        return sum_squares(grads)

    def averaged(output: torch.Tensor, mine: torch.Tensor, incoming: torch.Tensor, rank: int) -> None:
        others = [each for index, each in enumerate(incoming[:, : mine.numel()]) if index != rank]
        simulation.run("average", [mine, *others], [output])
        average(output, mine, incoming, rank)

    def updated(self: Any, updates: Any, before_piece: Any) -> None:
        states = [
            tensor
            for each in updates
            for tensor in (each.states.work, each.states.master, each.states.remainder, each.states.m, each.states.v)
            if tensor is not None
        ]
        targets = [tensor for each in updates for tensor in each.states.targets if tensor is not None]
        grads, work = [each.grad for each in updates], [each.states.work for each in updates]
        if before_piece is None:
            simulation.run("adamw", grads, states)
        else:
            simulation.run("adamw", [*grads, *states], [*targets, *work])
        update(self, updates, before_piece)

    def transferred(self: Any, work: Any) -> None:
        """A block from or to the disk, by a thread of its own; the piece is over when all its blocks are."""
        move, known = work.__self__, self.__dict__.setdefault("known", Agent("the blocks of a piece"))
        memory = torch.from_numpy(move.data)

        def run() -> None:
            is_load = work.__name__ == "read"
            simulation.run(f"{work.__name__} {move.piece}", [] if is_load else [memory], [memory] if is_load else [])
            work()
            with simulation.lock:
                known.join(simulation.thread.clock)
                simulation.thread.join(known.clock)

        transfer(self, run)

    return [
        mock.patch.object(cpu_kernels, "accumulate", accumulated),
        mock.patch.object(cpu_kernels, "sum_squares", summed),
        mock.patch.object(host_sum, "average", averaged),
        mock.patch.object(AdamWUpdater, "_update", updated),
        mock.patch.object(PieceTransfer, "run", transferred),
    ]


def _collectives(simulation: Simulation) -> list[Any]:
    found = []
    for name, (written, read) in COLLECTIVES.items():
        real = getattr(dist.ProcessGroup, name, None)
        if real is None:
            continue
        noted = _noted(simulation, name, real, written, read)
        found.append(mock.patch.object(dist.ProcessGroup, name, noted))
        aliases = [alias for alias in ("_all_gather", "_reduce_scatter") if getattr(reduction, alias) is real]
        found += [mock.patch.object(reduction, alias, noted) for alias in aliases]
    return found


def _noted(
    simulation: Simulation, name: str, real: Callable[..., Any], written: tuple[int, ...], read: tuple[int, ...]
) -> Callable[..., Any]:
    @wraps(real)
    def noted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        options = [each for each in (*args, *kwargs.values()) if hasattr(each, "asyncOp")]
        on_current = any(not each.asyncOp for each in options)
        reads, writes = (tensors_of(args[index] for index in some) for some in (read, written))
        stream = None if on_current else simulation.communication(group.group_name)
        with simulation.lock:
            if stream is not None:
                stream.join(simulation.current.clock)
            simulation.run(name, reads, writes, on=stream)
        work = real(group, *args, **kwargs)
        if on_current and work is not None:
            work.wait()
        return SimulatedWork(simulation, work, stream, [*reads, *writes])

    return noted


def _threads(simulation: Simulation) -> list[Any]:
    submit, start, result = ThreadPoolExecutor.submit, Lane.start, Future.result
    set_result, set_exception = Future.set_result, Future.set_exception

    def submitted(self: ThreadPoolExecutor, do: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        known = simulation.clock_of_thread()

        def task() -> Any:
            simulation.thread.join(known)
            with mock.patch.object(simulation.of_thread, "in_pool", True), Operators(simulation):
                return do(*args, **kwargs)

        return submit(self, task)

    def queued(self: Lane, run: Callable[[], Any], *others: Any) -> Future[Any]:
        known = simulation.clock_of_thread()  # the job that takes an action may have been submitted for another

        def taken() -> Any:
            simulation.thread.join(known)
            return run()

        return start(self, taken, *others)

    def told(setter: Callable[..., None]) -> Callable[..., None]:
        @wraps(setter)
        def setting(self: Any, value: Any) -> None:
            self.known = simulation.clock_of_thread()
            setter(self, value)

        return setting

    def taken(self: Any, timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            simulation.order(simulation.thread, getattr(self, "known", {}))

    def through(wait: Callable[..., None], is_left_out: Callable[[str], bool]) -> Callable[..., None]:
        @wraps(wait)
        def waiting(self: Any, *keys: Any) -> None:
            with simulation.muted(is_left_out("wait")):
                wait(self, *keys)

        return waiting

    own, others = simulation.is_skipped, simulation.leaves_out
    entries: list[tuple[type[Any], str, Callable[[str], bool]]] = [
        *((ScheduleExecutor, name, own) for name in ("wait", "stream_wait", "drain")),
        *((Unit, name, others) for name in ("wait_for_update", "await_update")),
        (AdamW, "synchronize", others),
    ]
    return [
        *(mock.patch.object(kind, name, through(getattr(kind, name), how)) for kind, name, how in entries),
        mock.patch.object(ThreadPoolExecutor, "submit", submitted),
        mock.patch.object(Lane, "start", queued),
        mock.patch.object(Future, "set_result", told(set_result)),
        mock.patch.object(Future, "set_exception", told(set_exception)),
        mock.patch.object(Future, "result", taken),
    ]
