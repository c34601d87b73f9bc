"""Collectives of CUDA tensors among several processes on one GPU, which nccl refuses: staged through gloo.

    caller's stream    ... work of the caller ... ready ...................... waits for `up` ... goes on
    down stream                                   waits for `ready`, copies to pinned memory, records `down`
    a lane's thread                               waits for `down`, exchanges host tensors over gloo
    up stream                                                               copies to the device, records `up`

So kernels, streams, events and the caching allocator are the real ones, and only the transport is not. What nccl
promises is kept: an operation reads its inputs and writes its outputs behind the work that the caller's stream holds
now; `work.wait()` lets the current stream wait for the result; an operation that is not asynchronous is in order on the
current stream; collectives of a group run in the order in which they were begun; tensors live until the work was waited
for. One thing differs: `wait()` also holds the host until gloo is done, since a stream cannot wait for an event that
another thread has yet to record. Sends and receives have a lane for each peer and direction, so that no order in which
they are posted deadlocks, where nccl needs them batched. Reductions gather the parts and fold them in rank order, in
their own dtype.

With device type `cpu` the same code runs without streams: that is how it is tested where there is no GPU.

Note: why kernels of the dispatcher and no subclass of `ProcessGroup`. C++ calls a Python subclass for some of its
methods only: it would be passed by where `_allgather_base` and `_reduce_scatter_base` are called on the base class, as
dzero calls them. Every way into a collective, from Python or C++, ends at an operator `c10d::...`, whose names and
arguments are the same from torch 2.11 to 2.13. These are replaced for one type of device, by `staged`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork

BACKEND = "staged"
"""The name for `init_process_group`, as in "cpu:gloo,cuda:staged"."""
COLLECTIVE = "collective"
"""The lane of what all ranks of a group do together."""
Exchange = Callable[[Any, list[Tensor], list[Tensor]], None]
"""exchange(gloo, sources, targets): blocks until the host tensors `targets` hold what was asked for."""
FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.RedOpType.SUM: torch.add,
    dist.ReduceOp.RedOpType.AVG: torch.add,
    dist.ReduceOp.RedOpType.MIN: torch.minimum,
    dist.ReduceOp.RedOpType.MAX: torch.maximum,
}
"""How two parts are reduced; other operations are a KeyError."""


class Lanes:
    """The copy streams of a process, and a thread for each lane of each group."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._down, self._up = (torch.cuda.Stream(device) if on_gpu else None for _ in range(2))
        self._threads: dict[tuple[str, str], ThreadPoolExecutor] = {}

    def begin(
        self,
        boxed: Any,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        exchange: Exchange,
        *,
        now: bool = False,
        lane: str = COLLECTIVE,
    ) -> Any:
        """Start an operation behind the current stream's work, and return its boxed work.

        boxed: the group, as the dispatcher hands it over. reads, writes: tensors on the device, of which the former go
        to the host first and the latter take the result. exchange: what gloo does with them. now: the current stream
        waits here, as for an operation that is not asynchronous. lane: operations of one run one after the other.
        """
        group = dist.ProcessGroup.unbox(boxed)
        sources, targets = ([self._on_host(each) for each in tensors] for tensors in (reads, writes))
        if self._down is not None:
            self._down.wait_event(torch.cuda.current_stream(self.device).record_event())
        down = copied(self._down, sources, reads)
        if (thread := self._threads.get((group.group_name, lane))) is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix=f"staged {lane}")
            self._threads[group.group_name, lane] = thread
        gloo = group._get_backend(self.device)
        coming = thread.submit(self._finish, down, gloo, exchange, sources, targets, [*reads], [*writes])
        held: list[Sequence[Tensor]] = [reads, writes]

        def wait(_: timedelta = timedelta()) -> bool:
            up = coming.result()
            if up is not None:
                torch.cuda.current_stream(self.device).wait_event(up)
            held.clear()
            return True

        if now:
            wait()
        return PythonCallbackWork(wait).boxed()

    def close(self) -> None:
        """Let the threads end."""
        for thread in self._threads.values():
            thread.shutdown(wait=False)

    def _on_host(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=self._down is not None)

    def _finish(
        self, down: Any, gloo: Any, exchange: Exchange, sources: Any, targets: Any, reads: Any, writes: Any
    ) -> Any:
        """Exchange on the host and copy to the device; `reads` live until they were copied. In a lane's thread."""
        if down is not None:
            down.synchronize()
        reads.clear()
        exchange(gloo, sources, targets)
        return copied(self._up, writes, targets)


def copied(stream: Any, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> Any:
    """Copy on a stream; the event behind that, None where there are no streams.

    `.data` has a version counter of its own, so that nobody takes what arrives for an edit.
    """
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.data.copy_(source.data, non_blocking=stream is not None)
        return None if stream is None else stream.record_event()


@contextmanager
def staged(device: torch.device) -> Iterator[None]:
    """Stage every collective of tensors on this type of device while inside; groups are made and ended inside."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _gloo, devices=["cpu", "cuda"])
    lanes = Lanes(device)
    library = torch.library.Library("c10d", "IMPL", device.type.upper())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # as is meant
            for name, kernel in KERNELS.items():
                library.impl(name, partial(kernel, lanes))
        yield
    finally:
        library._destroy()
        lanes.close()


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the gloo of a staged group: one of its own, whose order no collective of CPU tensors disturbs."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]


def _bytes(tensor: Tensor) -> Tensor:
    """gloo lacks some dtypes, and needs none of them to move data."""
    return tensor.reshape(-1).view(torch.uint8)


def gathered(gloo: Any, part: Tensor) -> list[Tensor]:
    """Return the part of every rank, in rank order; all are as large as this one."""
    if not part.numel():
        return [part] * gloo.size()
    found = [torch.empty_like(_bytes(part)) for _ in range(gloo.size())]
    gloo.allgather([found], [_bytes(part)]).wait()
    return [each.view(part.dtype).view(part.shape) for each in found]


def turn(gloo: Any, target: Tensor, source: Tensor, take: Sequence[int], give: Sequence[int]) -> None:
    """Send rank r its part of `source`, and write what came from it at its place in `target`.

    take, give: rows from and for each rank; empty where all are alike.
    """

    def counts(tensor: Tensor, rows: Sequence[int]) -> list[int]:
        row_bytes = tensor.nbytes // len(tensor) if len(tensor) else 0
        return [count * row_bytes for count in rows or [len(tensor) // gloo.size()] * gloo.size()]

    gloo.alltoall_base(_bytes(target), _bytes(source), counts(target, take), counts(source, give)).wait()


def folded(parts: Sequence[Tensor], boxed: Any) -> Tensor:
    """Return the parts reduced in rank order, rounded in their dtype after each step, as a ring of nccl's rounds."""
    op, total = dist.ReduceOp.RedOpType(boxed.op()), parts[0].clone()
    for part in parts[1:]:
        total = FOLDS[op](total, part)
    return total / len(parts) if op == dist.ReduceOp.RedOpType.AVG else total


def _all_reduce(
    lanes: Lanes, tensors: list[Tensor], group: Any, op: Any, _: object, async_op: bool = True, __: int = -1
) -> Any:
    return tensors, _all_reduce_coalesced(lanes, tensors, group, op, async_op, 0)


def _all_reduce_coalesced(
    lanes: Lanes, tensors: list[Tensor], group: Any, op: Any, async_op: bool = True, _: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(folded(gathered(gloo, source), op))

    return lanes.begin(group, tensors, tensors, exchange, now=not async_op)


def _all_gather(
    lanes: Lanes, outputs: list[list[Tensor]], inputs: list[Tensor], group: Any, async_op: bool = True, _: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for target, part in zip(targets, gathered(gloo, sources[0]), strict=True):
            target.copy_(part.view(target.shape))

    return outputs, lanes.begin(group, inputs, outputs[0], exchange, now=not async_op)


def _all_gather_coalesced(
    lanes: Lanes, outputs: list[Tensor], inputs: list[Tensor], group: Any, async_op: bool = True
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(torch.stack(gathered(gloo, source)).view(target.shape))

    return lanes.begin(group, inputs, outputs, exchange, now=not async_op)


def _all_gather_single(
    lanes: Lanes, output: Tensor, given: Tensor, group: Any, async_op: bool = True, _: int = -1
) -> tuple[Tensor, Any]:
    return output, _all_gather_coalesced(lanes, [output], [given], group, async_op)


def _reduce_scatter_coalesced(
    lanes: Lanes, outputs: list[Tensor], inputs: list[Tensor], group: Any, op: Any, async_op: bool = True, _: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            parts = source.view(gloo.size(), -1)
            came = torch.empty_like(parts)
            turn(gloo, came, parts, [], [])
            target.copy_(folded([*came.unbind()], op).view(target.shape))

    return lanes.begin(group, inputs, outputs, exchange, now=not async_op)


def _reduce_scatter_single(
    lanes: Lanes, output: Tensor, given: Tensor, group: Any, op: Any, async_op: bool = True, _: int = -1
) -> tuple[Tensor, Any]:
    return output, _reduce_scatter_coalesced(lanes, [output], [given], group, op, async_op, 0)


def _all_to_all_single(
    lanes: Lanes,
    output: Tensor,
    given: Tensor,
    group: Any,
    take: list[int],
    give: list[int],
    async_op: bool = True,
    _: int = -1,
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        turn(gloo, targets[0], sources[0], take, give)

    return lanes.begin(group, [given], [output], exchange, now=not async_op)


def _broadcast(
    lanes: Lanes, tensors: list[Tensor], group: Any, root: int, _: int, async_op: bool = True, __: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        targets[0].copy_(sources[0])
        if sources[0].numel():
            gloo.broadcast(_bytes(targets[0]), root).wait()

    return tensors, lanes.begin(group, tensors, tensors, exchange, now=not async_op)


def _barrier(lanes: Lanes, _: Tensor, group: Any, __: list[int], async_op: bool = True, ___: int = -1) -> Any:
    return lanes.begin(group, [], [], lambda gloo, *_: gloo.barrier().wait(), now=not async_op)


def _send(lanes: Lanes, tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], _: list[Tensor]) -> None:
        gloo.send([_bytes(each) for each in sources], peer, tag).wait()

    return lanes.begin(group, tensors, [], exchange, lane=f"to {peer}")


def _receive(lanes: Lanes, tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    def exchange(gloo: Any, _: list[Tensor], targets: list[Tensor]) -> None:
        gloo.recv([_bytes(each) for each in targets], peer, tag).wait()

    return lanes.begin(group, [], tensors, exchange, lane=f"from {peer}")


KERNELS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_single,
    "allgather_into_tensor_coalesced_": _all_gather_coalesced,
    "_reduce_scatter_base_": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "alltoall_base_": _all_to_all_single,
    "broadcast_": _broadcast,
    "barrier": _barrier,
    "send": _send,
    "recv_": _receive,
}
"""By the names of torch's operators; others raise what gloo raises for CUDA tensors."""
