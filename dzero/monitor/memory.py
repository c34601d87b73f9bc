"""How much memory: the bytes of given tensors exactly, and the peak of a rank split by kind.

    state kinds    param, grad, master, moments         counted: the storages of their tensors
    process        CPU: in RAM before the model was built (interpreter, libraries); CUDA: allocated before
    activations    peak - process - states              a difference, so it holds temporaries, buffers of collectives
                                                        and, on the CPU, whatever the allocator keeps
    peak           CUDA: the caching allocator's counter of allocated bytes, exact
                   CPU: the process's high-water mark in RAM (VmHWM); pages never touched are not in it

torch keeps no peak counter for the CPU. `allocated_peak_bytes` has the exact one for a call, from the profiler's
allocation events: good for tests and benchmarks, too slow to run along.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dzero import streams
from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes

ACTIVATIONS, PROCESS = "activations", "process"


class MemoryMeter:
    """Peak memory of this rank on `device` (the process, when that is a CPU). Make it before the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.process_bytes = self._now_bytes()

    def reset(self) -> bool:
        """Forget the peak so far. False where the system refuses: the peak then reaches back to the process's start."""
        if self._device.type != "cuda":
            return reset_peak_rss()
        torch.cuda.reset_peak_memory_stats(self._device)
        return True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is done inside is no part of the run: what stays in memory of it counts as the process's."""
        before = self._now_bytes()
        yield
        self.process_bytes += max(0, self._now_bytes() - before)

    def _now_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else rss_bytes()

    def peak_bytes(self) -> int:
        """The most in use since `reset`."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else peak_rss_bytes()

    def split(self, state_bytes: Mapping[str, int]) -> dict[str, int]:
        """The peak by kind, `state_bytes` (kind -> bytes on this device at the peak) first; the kinds add up to it.

        `activations` is what remains, never below 0: with states that were not touched yet the sum exceeds the peak.
        """
        rest = self.peak_bytes() - self.process_bytes - sum(state_bytes.values())
        return {**state_bytes, ACTIVATIONS: max(0, rest), PROCESS: self.process_bytes}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that `tensors` keep allocated on this rank; a storage that several share counts once.

    Wrappers (DTensor, 8-bit states) count as the local tensors they hold, meta tensors as nothing.
    """
    storages = {}
    for tensor in tensors:
        for part in _plain_parts(tensor):
            storage = part.untyped_storage()
            if part.device.type != "meta" and storage.nbytes():
                storages[part.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def allocated_peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """The most that tensors made during `run()` on `device` occupied at once, above what was allocated before.

    CPU: exact for this thread and autograd's, with an exception: freeing memory from before `run` does not lower
    the count, so for code that also does this it is an upper bound.
    """
    if device.type == "cuda":
        streams.synchronize_device(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        streams.synchronize_device(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if _is_cpu_allocation(e))
    allocated = peak = 0
    for _, change_bytes in changes:
        allocated += change_bytes
        peak = max(peak, allocated)
    return peak


def _is_cpu_allocation(event: dict[str, object]) -> bool:
    args = event.get("args")
    return event.get("name") == "[memory]" and isinstance(args, dict) and args.get("Device Type") == 0


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors with storage that make up a wrapper subclass (torch's `__tensor_flatten__`), or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # a DTensor names its mesh among them
    parts = [getattr(tensor, name) for name in names]
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in _plain_parts(part)]
