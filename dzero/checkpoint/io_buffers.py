"""Reusable host buffers for data on its way to or from the disk, aligned for direct I/O.

Fresh pages cost more than the disk transfer. They are allocated on first use, or in advance by `touch` in a background
thread. With a GPU, `touch` also page-locks them, so that copies from the device run at the link's speed.
"""

from __future__ import annotations

from queue import SimpleQueue

import torch

from dzero import streams
from dzero.offload.memory_pool import HostMemoryPool, aligned

BLOCK_BYTES = 16 << 20


class IOBuffers:
    """Pool of `count` uint8 buffers, which tensors may be copied to from `device`; `free` holds those not in use."""

    def __init__(self, count: int, *, block_bytes: int = BLOCK_BYTES, device: torch.device | None = None) -> None:
        self.count, self.block_bytes, self._device = count, block_bytes, device
        self._memory_pool = HostMemoryPool(
            count * aligned(block_bytes), pin=device is not None and device.type == "cuda"
        )
        self._leases = [self._memory_pool.lease(block_bytes, f"checkpoint buffer {number}") for number in range(count)]
        self.free: SimpleQueue[torch.Tensor] = SimpleQueue()
        for lease in self._leases:
            self.free.put(lease.data)

    def touch(self) -> None:
        """Allocate all pages before any buffer is in use; may be called from any thread."""
        if self._device is not None:
            streams.set_device(self._device)  # page-locking uses the thread's current device
        self._memory_pool.settle()
