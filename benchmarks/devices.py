"""The device that a benchmark measures: a CUDA GPU, or the CPU, which stands in for one where code is only tried.

asked of it              a GPU                                the CPU instead
synchronize              waits for all streams                nothing: an operation that returned has ended
peak_bytes               the allocator's counter              0: torch keeps none for the CPU
seconds_between          events on the stream                 the host's clock
keep_busy                a kernel that spins                  nothing
copies to and from it    the link                             copies within host memory
group                    gloo and nccl                        gloo
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dzero.models.config import ModelConfig

TINY = ModelConfig(vocab_size=256, hidden_size=64, layers=2, heads=2, ffn_size=128)
"""What is trained on a CPU."""


class Device:
    """One of the table's two columns.

    Raises SystemExit where a GPU is asked for and torch finds none.
    """

    def __init__(self, kind: str) -> None:
        self.on_gpu = kind == "cuda"
        if self.on_gpu and not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device here; --device cpu (in gpu_session.py --rehearse) does all")
        self.torch = torch.device("cuda", 0) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.init()
            torch.cuda.set_device(self.torch)

    @property
    def name(self) -> str:
        """The GPU's name as its driver says it, or `cpu`."""
        return torch.cuda.get_device_name(self.torch) if self.on_gpu else "cpu"

    def synchronize(self) -> None:
        """Wait until the device has done all that it was told."""
        if self.on_gpu:
            torch.cuda.synchronize(self.torch)

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the host's seconds of `run` on an idle device, until the device is idle again."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return time.perf_counter() - start

    def median_seconds(self, run: Callable[[], object], repeats: int) -> float:
        """Return the median of `repeats` timings, after one that does not count."""
        return median([self.seconds(run) for _ in range(repeats + 1)][1:])

    def mark(self) -> Any:
        """Return a mark on the current stream, for `seconds_between`."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, begin: Any, end: Any) -> float:
        """Return the device's seconds between two marks, which it has reached."""
        return float(begin.elapsed_time(end)) / 1e3 if self.on_gpu else float(end - begin)

    def keep_busy(self, cycles: int) -> None:
        """Enqueue a kernel that spins for so many cycles, so that what follows waits in the queue."""
        if self.on_gpu:
            torch.cuda._sleep(cycles)

    def reset_peak(self) -> None:
        """Start the peak of allocated bytes anew."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats(self.torch)

    def peak_bytes(self) -> int:
        """Return the most bytes that were allocated since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.torch) if self.on_gpu else 0

    def free(self) -> None:
        """Give back what caches keep, on the device and page-locked on the host."""
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
            empty = getattr(torch.accelerator.memory, "empty_host_cache", None)  # torch 2.11 has it under its own name
            (empty or torch._C._host_emptyCache)()

    @contextmanager
    def group(self, timeout: timedelta = timedelta(minutes=5)) -> Iterator[None]:
        """Be the only rank of a process group while inside."""
        backend, bound = ("cpu:gloo,cuda:nccl", self.torch) if self.on_gpu else ("gloo", None)
        with tempfile.TemporaryDirectory() as folder:
            at = f"file://{folder}/group"
            dist.init_process_group(backend, init_method=at, rank=0, world_size=1, timeout=timeout, device_id=bound)
            try:
                yield
            finally:
                dist.destroy_process_group()
