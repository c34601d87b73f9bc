"""Prefetch of microbatches: the next one is copied to the device while the device computes with the current one.

    next()    makes the current stream wait for the copy of this microbatch; the host does not wait
              reads the next microbatch into pinned memory; its copy starts when the device reaches this point

The copy stream waits for the current stream first, so memory that an earlier microbatch freed is no longer read when a
copy reuses it. On devices without streams, a microbatch is read when it is requested.
"""

from __future__ import annotations

import torch

from dzero import streams
from dzero.data.stream import Batch, TokenStream


class BatchPrefetcher:
    """Iterator over the microbatches of `stream`, on `device`.

    The position of `stream` counts the microbatches that `next` returned, not those prefetched.
    """

    def __init__(self, stream: TokenStream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._copies = streams.new_stream(device)
        self._coming: tuple[int, Batch, streams.Event] | None = None

    def next(self) -> Batch:
        """Return the next (inputs, targets), both int64 [microbatch_sequences, sequence_tokens]."""
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
        rows = [streams.pin_memory(each, self._device) for each in self._stream.peek()]
        current = streams.current_stream(self._device)
        with streams.use_stream(self._copies, self._device):
            streams.wait_stream(current, self._device)
            inputs, targets = (torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in rows)
            inputs.copy_(rows[0], non_blocking=True)
            targets.copy_(rows[1], non_blocking=True)
            return self._stream.samples, (inputs, targets), streams.record_event(self._device)
