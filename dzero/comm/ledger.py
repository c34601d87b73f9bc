"""What moved: every collective of the project, counted where it is issued.

    entry  = (phase, kind, axis, dtype)  ->  calls, bytes
    bytes  = payload that one rank must send, with n ranks that own e elements each (padded to the largest):
             all_gather, reduce_scatter   (n - 1) * e * wire bytes
             all_reduce                   (n - 1) * e * (wire bytes out + bytes back)
             all_to_all                   what it has for each of the others; they may differ (optim/rank_assignment.py)

These are the bandwidth-optimal counts; the `exact` collectives send just these, a backend's own may send more.
An entry costs one dictionary addition per *collective* (not per operator), with no synchronisation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from dzero.comm.collective_log import CollectiveLog

EXCEPTIONAL = "exceptional"
"""The phase of what few steps send: to name parameters whose gradients are not finite, or edited apart on copies."""


@dataclass(frozen=True, order=True)
class Entry:
    """`phase` (unshard, reduce, tensor, context, experts, pipeline, update, control, exceptional), `kind` of
    collective, mesh `axis`, `dtype` sent."""

    phase: str
    kind: str
    axis: str
    dtype: str

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, phase: str, kind: str, axis: str, dtype: torch.dtype) -> Entry:
        """Return the one with these values, which a step has many times."""
        return cls(phase, kind, axis, dtype_key(dtype))


@dataclass(frozen=True)
class Traffic:
    """Calls and bytes sent by one rank."""

    calls: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.sent_bytes + other.sent_bytes)


def dtype_key(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16, as in entries."""
    return str(dtype).removeprefix("torch.")


class Ledger:
    """Running totals since the last `take()`. `collective_log`: which collective this rank is in.

    listener: told of every one that is counted, with the bytes it sends.
    """

    def __init__(self) -> None:
        self.collective_log = CollectiveLog()
        self.listener: Callable[[Entry, int], None] | None = None
        self._calls: Counter[Entry] = Counter()
        self._bytes: Counter[Entry] = Counter()

    def record(self, phase: str, kind: str, axis: str, dtype: torch.dtype, sent_bytes: int) -> None:
        """Count one collective along `axis` that sends `sent_bytes` from this rank."""
        entry = Entry.of(phase, kind, axis, dtype)
        self._calls[entry] += 1
        self._bytes[entry] += sent_bytes
        if self.listener is not None:
            self.listener(entry, sent_bytes)

    def totals(self) -> dict[Entry, Traffic]:
        """Totals by entry, without resetting them."""
        return {entry: Traffic(self._calls[entry], self._bytes[entry]) for entry in sorted(self._calls)}

    def take(self) -> dict[Entry, Traffic]:
        """Totals by entry since the last call; starts counting anew."""
        totals = self.totals()
        self._calls.clear()
        self._bytes.clear()
        return totals
