"""Upload of a call's columns to the device by one asynchronous host-to-device copy from pinned memory.

Note: when a pinned buffer may be reused. When `copy_` from pinned memory returns, the copy is only enqueued, and the
host may run several calls ahead of the device. If the host wrote call t + 1 into the buffer of call t, the device could
read columns of t + 1 in call t, without an error. Therefore there are `RING` pinned buffers, each with an event that is
recorded after its last copy, and the host waits for that event before it writes the buffer again. It waits only when it
is `RING` calls ahead. The device buffer needs no ring, because the stream runs the launches that read call t before
the copy of call t + 1.
"""

from __future__ import annotations

import torch

from dzero import streams
from dzero.utils.numba_views import Array

RING = 2
"""Number of pinned buffers."""


class ColumnUpload:
    """Upload of columns through `RING` pinned buffers into one device buffer.

    The device buffer belongs to the stream that is current at construction.

    Args:
        words: Maximum size of one upload, in units of 8 bytes.
        device: Target device. A CPU receives a copy too.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self._hosts = [torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(RING)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied: list[streams.Event] = [None] * RING  # recorded after each buffer's last copy
        self._device = torch.empty(words, dtype=torch.int64, device=device)
        self._stream = streams.current_stream(self._device.device)
        self._turn = 0

    def send(self, *columns: Array) -> torch.Tensor:
        """Enqueue one copy of all `columns` on the current stream.

        Returns:
            The device buffer, int64 [words]. It holds the columns in order, in their own dtypes, each aligned to
            8 bytes. The next call overwrites it.
        """
        self._turn = (self._turn + 1) % RING
        host, array, used = self._hosts[self._turn], self._arrays[self._turn], 0
        streams.synchronize(self._copied[self._turn])
        for column in columns:
            array[used:].view(column.dtype)[: column.size] = column.reshape(-1)
            used += -(-column.nbytes // 8)
        self._follow_stream()
        self._copied[self._turn] = _enqueue_copy(self._device[:used], host[:used])
        return self._device

    def _follow_stream(self) -> None:
        """Make a new current stream wait for the launches of the previous stream, which read the device buffer."""
        stream = streams.current_stream(self._device.device)
        if self._stream != stream:
            streams.wait_stream(self._stream, self._device.device)
            streams.record_stream(self._device)  # so that its memory is not reused before this stream's launches end
            self._stream = stream


def _enqueue_copy(target: torch.Tensor, source: torch.Tensor) -> streams.Event:
    """Enqueue the copy; return an event recorded after it, or None if the copy is complete."""
    target.copy_(source, non_blocking=True)
    return streams.record_event(target.device)
