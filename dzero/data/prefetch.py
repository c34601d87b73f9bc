"""Microbatches on the device, one ahead: the next is copied while the device computes with this one.

    next()    the current stream waits for the copy of this microbatch, the host does not
              the next one is read into page-locked memory; its copy starts once the device has come to this point

So memory that the copy is given, freed by a microbatch before, has been read by everybody; it is known when it comes
back. Without streams there is nothing to run ahead of: a microbatch is read when it is asked for.
"""

from __future__ import annotations

import torch

from dzero import streams
from dzero.data.stream import Batch, TokenStream


class BatchPrefetcher:
    """The microbatches of `stream` on `device`; `stream` stands where they are taken, not where they are read."""

    def __init__(self, stream: TokenStream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._copies = streams.new_stream(device)
        self._coming: tuple[int, Batch, streams.Event] | None = None

    def next(self) -> Batch:
        """Return the next (inputs, targets), both int64 [microbatch_sequences, sequence_tokens]."""
        if not streams.exist(self._device):
            return self._stream.next()
        if self._coming is None or self._coming[0] != self._stream.samples:  # the first, or the stream was set back
            self._coming = self._copied()
        _, batch, copied = self._coming
        self._stream.skip()
        self._coming = self._copied()
        streams.wait_event(copied, self._device)
        return batch

    def _copied(self) -> tuple[int, Batch, streams.Event]:
        """Start the copy of the microbatch that comes next; return where the stream stands, it, and the event."""
        rows = [streams.pin_memory(each, self._device) for each in self._stream.peek()]
        current = streams.current_stream(self._device)
        with streams.use_stream(self._copies, self._device):
            streams.wait_stream(current, self._device)
            inputs, targets = (torch.empty(each.shape, dtype=each.dtype, device=self._device) for each in rows)
            inputs.copy_(rows[0], non_blocking=True)
            targets.copy_(rows[1], non_blocking=True)
            return self._stream.samples, (inputs, targets), streams.record_event(self._device)
