"""The way of a collective of CUDA tensors over gloo: through pinned memory, on streams and threads of its own.

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
they are posted deadlocks, where nccl needs them batched.

With device type `cpu` the same code runs without streams: that is how it is tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork

Exchange = Callable[[Any, list[Tensor], list[Tensor]], None]
"""exchange(gloo, sources, targets): blocks until the host tensors `targets` hold what was asked for."""
COLLECTIVE = "collective"
"""The lane of what all ranks of a group do together."""


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

        Args:
            boxed: The group, as the dispatcher hands it over.
            reads: Tensors on the device that go to the host first.
            writes: Tensors on the device that take the result.
            exchange: What gloo does with them.
            now: Whether the current stream waits here, as for an operation that is not asynchronous.
            lane: Operations of one lane run one after the other.
        """
        group = dist.ProcessGroup.unbox(boxed)
        sources, targets = ([self._on_host(each) for each in tensors] for tensors in (reads, writes))
        down = self._copy_down(sources, reads)
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

    def _copy_down(self, sources: Sequence[Tensor], reads: Sequence[Tensor]) -> Any:
        """Copy to the host behind the current stream's work; the event after it, None where there are no streams."""
        if self._down is None:
            for source, each in zip(sources, reads, strict=True):
                source.copy_(each.data)
            return None
        self._down.wait_event(torch.cuda.current_stream(self.device).record_event())
        with torch.cuda.stream(self._down):
            for source, each in zip(sources, reads, strict=True):
                source.copy_(each.data, non_blocking=True)
            return self._down.record_event()

    def _finish(
        self,
        down: Any,
        gloo: Any,
        exchange: Exchange,
        sources: list[Tensor],
        targets: list[Tensor],
        reads: list[Tensor],
        writes: list[Tensor],
    ) -> Any:
        """Exchange on the host and copy to the device; `reads` live until they were copied. In a lane's thread.

        `.data` has a version counter of its own, so that nobody takes what arrives for an edit.
        """
        if down is not None:
            down.synchronize()
        reads.clear()
        exchange(gloo, sources, targets)
        if self._up is None:
            for each, target in zip(writes, targets, strict=True):
                each.data.copy_(target)
            return None
        with torch.cuda.stream(self._up):
            for each, target in zip(writes, targets, strict=True):
                each.data.copy_(target, non_blocking=True)
            return self._up.record_event()
