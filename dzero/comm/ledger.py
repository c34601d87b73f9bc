"""Ledger of the project's collectives, each counted where it is issued.

    entry  = (phase, kind, axis, dtype)  ->  calls, bytes
    bytes  = payload that one rank must send, with n ranks that own e elements each (padded to the largest):
             all_gather, reduce_scatter   (n - 1) * e * wire bytes
             all_reduce                   (n - 1) * e * (wire bytes out + bytes back)
             all_to_all                   payload for the other ranks; sizes may differ (optim/rank_assignment.py)

These are the bandwidth-optimal counts. The `exact` collectives send just these; a backend's own may send more.
An entry costs one dictionary addition per *collective* (not per operator), with no synchronization.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from dzero.comm.collective_log import CollectiveLog

EXCEPTIONAL = "exceptional"
"""Phase of rare collectives, which name parameters with non-finite gradients, or gradients that differ after edits."""


@dataclass(frozen=True, order=True)
class Entry:
    """Key of the ledger.

    Attributes:
        phase: unshard, reduce, tensor, context, experts, pipeline, update, control or exceptional.
        dtype: Dtype that is sent, as `dtype_key` names it.
    """

    phase: str
    kind: str
    axis: str
    dtype: str

    @classmethod
    @lru_cache(maxsize=1024)
    def of(cls, phase: str, kind: str, axis: str, dtype: torch.dtype) -> Entry:
        """Return a cached instance, because every step repeats its entries."""
        return cls(phase, kind, axis, dtype_key(dtype))


@dataclass(frozen=True)
class Traffic:
    """Calls, and bytes that one rank sends."""

    calls: int = 0
    sent_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.calls + other.calls, self.sent_bytes + other.sent_bytes)


def dtype_key(dtype: torch.dtype) -> str:
    """Return the name of a dtype in entries, e.g. `bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


class Ledger:
    """Running totals since the last `take()`.

    Attributes:
        collective_log: Log of this rank's collectives.
        listener: Called for every counted collective with its entry and the bytes it sends.
    """

    def __init__(self) -> None:
        self.collective_log = CollectiveLog()
        self.listener: Callable[[Entry, int], None] | None = None
        self._calls: Counter[Entry] = Counter()
        self._bytes: Counter[Entry] = Counter()

    def record(self, phase: str, kind: str, axis: str, dtype: torch.dtype, sent_bytes: int, *, calls: int = 1) -> None:
        """Count one collective, or several `calls`, along `axis` that send `sent_bytes` from this rank."""
        entry = Entry.of(phase, kind, axis, dtype)
        self._calls[entry] += calls
        self._bytes[entry] += sent_bytes
        if self.listener is not None:
            self.listener(entry, sent_bytes)

    def totals(self) -> dict[Entry, Traffic]:
        """Return the totals by entry, without resetting them."""
        return {entry: Traffic(self._calls[entry], self._bytes[entry]) for entry in sorted(self._calls)}

    def take(self) -> dict[Entry, Traffic]:
        """Return the totals by entry since the last call, and reset them."""
        totals = self.totals()
        self._calls.clear()
        self._bytes.clear()
        return totals
