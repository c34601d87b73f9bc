"""The independent auditor of traffic: counts what torch itself dispatches to a process group, below all our objects.

    dispatched op          bytes that this rank sends, in a group of n ranks
    send                   the tensor's
    _allgather_base_       (n - 1) * the input's
    _reduce_scatter_base_  (n - 1) * the output's
    alltoall_base_         (n - 1) / n * the input's
    allreduce_             2 (n - 1) / n * the tensor's (the bandwidth-optimal count)
    all_to_all_single      the input's, none of which stays (the functional one)
    recv_, wait, ...       none

Backward on the CPU runs in the caller's thread, so what FSDP2's hooks issue there is seen as well.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class DispatchCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`calls` and `sent_bytes` by the name of the c10d op, for groups of `ranks` ranks."""

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ranks = ranks
        self.calls: Counter[str] = Counter()
        self.sent_bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" or func.name() == "_c10d_functional::all_to_all_single":
            name = func.name().partition("::")[2]
            self.calls[name] += 1
            self.sent_bytes[name] += self._sent(name, args)
        return func(*args, **(kwargs or {}))

    def _sent(self, name: str, args: Any) -> int:
        others = self.ranks - 1
        if name in ("send", "all_to_all_single"):  # the latter to one other rank, as torch's ring calls it
            return nbytes(args[0])
        if name == "_allgather_base_":
            return others * nbytes(args[1])
        if name == "_reduce_scatter_base_":
            return others * nbytes(args[0])
        if name == "alltoall_base_":
            return others * nbytes(args[1]) // self.ranks
        if name == "allreduce_":
            return 2 * others * nbytes(args[0]) // self.ranks
        if name in ("recv_", "barrier", "monitored_barrier_"):
            return 0
        raise AssertionError(f"c10d::{name} is not in the auditor's table")


def nbytes(tensors: Tensor | list[Tensor]) -> int:
    flat = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return sum(t.numel() * t.element_size() for t in flat)
