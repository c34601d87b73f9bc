"""Memory for what is on its way to the disk or from it: aligned for direct I/O, and used again and again.

Fresh pages cost more than the disk does: they come with first use, or by `touch` where nobody waits for them. Beside a
GPU that also locks them, so that copies from the device go at the link's speed.
"""

from __future__ import annotations

from queue import SimpleQueue

import torch

from dzero import streams
from dzero.offload.memory_pool import HostMemoryPool, aligned

BLOCK_BYTES = 16 << 20


class IOBuffers:
    """`count` of them, uint8 [block_bytes], in `free` while nobody uses them. device: where tensors come from."""

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
        """Take their pages now, before any is in use. From any thread."""
        if self._device is not None:
            streams.set_device(self._device)  # which knows of locked pages
        self._memory_pool.settle()
