"""The way of a call's columns to the device: one host-to-device copy from pinned memory, which nothing waits for.

Note: when a pinned buffer may be written again. When `copy_` from pinned memory returns, the copy is only enqueued,
and the host may run several calls ahead of the device. If it wrote call t + 1 into the buffer of call t at once, the
device might read columns of t + 1 in call t, without an error. So there are `RING` buffers, each with the event
that was recorded behind its last copy, and the host waits for that event before it writes the buffer again. It waits
only when it is `RING` calls ahead. The buffer on the device needs no ring: its stream runs the launches that read
call t before the copy of call t + 1.
"""

from __future__ import annotations

import torch

from dzero import streams
from dzero.utils.numba_views import Array

RING = 2
"""Pinned buffers that take turns."""


class ColumnUpload:
    """`RING` pinned buffers and one on the device, which is on the stream that is current when this is made.

    Args:
        words: The most that one call sends, in units of 8 bytes.
        device: Where the columns go; on a CPU they are copied, too.
    """

    def __init__(self, words: int, device: torch.device) -> None:
        self._hosts = [torch.empty(words, dtype=torch.int64, pin_memory=device.type == "cuda") for _ in range(RING)]
        self._arrays = [host.numpy() for host in self._hosts]
        self._copied: list[streams.Event] = [None] * RING  # behind each buffer's last copy
        self._device = torch.empty(words, dtype=torch.int64, device=device)
        self._stream = streams.current_stream(self._device.device)
        self._turn = 0

    def send(self, *columns: Array) -> torch.Tensor:
        """Enqueue one copy of all `columns` on the current stream.

        Returns:
            The device's buffer, int64 [words]: the columns in their order and dtypes, each from an 8-byte boundary on.
            It is overwritten by the next call.
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
        """Let a stream that takes over wait for the launches that read the device's buffer on the stream before."""
        stream = streams.current_stream(self._device.device)
        if self._stream != stream:
            streams.wait_stream(self._stream, self._device.device)
            streams.record_stream(self._device)  # freed early, its memory waits for this stream's launches as well
            self._stream = stream


def _enqueue_copy(target: torch.Tensor, source: torch.Tensor) -> streams.Event:
    """Copy without waiting; return the event that tells when `source` has been read, None if it has been."""
    target.copy_(source, non_blocking=True)
    return streams.record_event(target.device)
