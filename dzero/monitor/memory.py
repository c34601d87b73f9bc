"""Measurement of memory: the exact bytes of given tensors, and the peak of a rank by kind.

    state kinds    param, grad, master, moments         counted: the storages of their tensors
    process        CPU: in RAM before the model was built (interpreter, libraries); CUDA: allocated before
    activations    peak - process - states              a difference, so it includes temporaries, buffers of collectives
                                                        and, on the CPU, memory that the allocator keeps
    peak           CUDA: the caching allocator's counter of allocated bytes, exact
                   CPU: the process's high-water mark in RAM (VmHWM), without pages that were never touched

torch has no peak counter for the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes

ACTIVATIONS, PROCESS = "activations", "process"


class MemoryMeter:
    """Meter of this rank's peak memory on `device` (for a CPU, of the process). Create it before the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.process_bytes = self._now_bytes()

    def reset(self) -> bool:
        """Reset the peak; return False if the system refuses, so that the peak counts from the start of the process."""
        if self._device.type != "cuda":
            return reset_peak_rss()
        torch.cuda.reset_peak_memory_stats(self._device)
        return True

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the work inside from the run: memory that it leaves allocated counts as the process's."""
        before = self._now_bytes()
        yield
        self.process_bytes += max(0, self._now_bytes() - before)

    def _now_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else rss_bytes()

    def peak_bytes(self) -> int:
        """Return the largest number of bytes in use since `reset`."""
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else peak_rss_bytes()

    def split(self, state_bytes: Mapping[str, int]) -> dict[str, int]:
        """Return the peak by kind, given the bytes of each kind of state on this device at the peak.

        `activations` is the remainder, at least 0: if states were not touched yet, the sum exceeds the peak.
        """
        rest = self.peak_bytes() - self.process_bytes - sum(state_bytes.values())
        return {**state_bytes, ACTIVATIONS: max(0, rest), PROCESS: self.process_bytes}


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that `tensors` keep allocated on this rank; a shared storage counts once.

    Wrappers (DTensor, 8-bit states) count as the local tensors that they hold. Meta tensors count as nothing.
    """
    storages = {}
    for tensor in tensors:
        for part in _plain_parts(tensor):
            storage = part.untyped_storage()
            if part.device.type != "meta" and storage.nbytes():
                storages[part.device, storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the plain tensors within a wrapper subclass (`__tensor_flatten__`), or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()  # for a DTensor, its mesh is one of them
    parts = [getattr(tensor, name) for name in names]
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in _plain_parts(part)]
