"""Prefetch of microbatches: the next one is copied to the device while the device computes with the current one.

    next()    makes the current stream wait for the copy of this microbatch; the host does not wait
              reads the next microbatch into pinned memory; its copy starts when the device reaches this point

The copy stream waits for the current stream first, so memory that an earlier microbatch freed is no longer read when a
copy reuses it. On devices without streams, a microbatch is read when it is requested.
"""

from __future__ import annotations

import torch

from dzero import streams
from dzero.data.batch import Batch
from dzero.data.stream import SequenceStream


class BatchPrefetcher:
    """Iterator over the microbatches of `stream`, on `device`.

    The position of `stream` counts the microbatches that `next` returned, not those prefetched.
    """

    def __init__(self, stream: SequenceStream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._copies = streams.new_stream(device)
        self._coming: tuple[int, Batch, streams.Event] | None = None

    def next(self) -> Batch:
        """Return the next microbatch, on the device."""
        if not streams.exist(self._device):
            return self._stream.next()
        if self._coming is None or self._coming[0] != self._stream.samples:  # first call, or the stream was moved
            self._coming = self._copied()
        _, batch, copied = self._coming
        self._stream.skip()
        try:
            self._coming = self._copied()
        except Exception:
            self._coming = None  # the next call reads it again, and raises what is wrong with it
        streams.wait_event(copied, self._device)
        return batch

    def _copied(self) -> tuple[int, Batch, streams.Event]:
        """Start the copy of the next microbatch; return the position of the stream, the microbatch, and an event."""
        pinned = self._stream.peek().map(lambda each: streams.pin_memory(each, self._device))
        current = streams.current_stream(self._device)
        with streams.use_stream(self._copies, self._device):
            streams.wait_stream(current, self._device)
            return self._stream.samples, pinned.map(self._copy), streams.record_event(self._device)

    def _copy(self, pinned: torch.Tensor) -> torch.Tensor:
        copy = torch.empty(pinned.shape, dtype=pinned.dtype, device=self._device)
        return copy.copy_(pinned, non_blocking=True)
