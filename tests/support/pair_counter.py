"""Who sends to whom: what this rank dispatches to process groups, by the global rank that it goes to.

dispatched op      goes to
send               its destination
_allgather_base_   every other rank of the group, the input each
alltoall_base_     every other rank of the group, its part of the input each
all others         none that is counted; one that moves data otherwise is refused
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist
from dispatch_counter import nbytes
from torch.utils._python_dispatch import TorchDispatchMode


class PairCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`sent_bytes` by destination."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().removeprefix("c10d::")
            if name == "send":
                tensors, group, to, _ = args
                self.sent_bytes[ranks_of(group)[to]] += nbytes(tensors)
            elif name in ("_allgather_base_", "alltoall_base_"):
                _, tensor, group, *_ = args
                ranks = ranks_of(group)
                each = nbytes(tensor) if name == "_allgather_base_" else nbytes(tensor) // len(ranks)
                self.sent_bytes.update({rank: each for rank in ranks if rank != dist.get_rank()})
            elif name not in ("recv_", "barrier"):
                raise AssertionError(f"c10d::{name} is not in the auditor's table")
        return func(*args, **(kwargs or {}))

    def across(self, node_ranks: int) -> int:
        """Bytes to ranks of other nodes, so many neighbours being one."""
        own = dist.get_rank() // node_ranks
        return sum(count for rank, count in self.sent_bytes.items() if rank // node_ranks != own)

    @property
    def total(self) -> int:
        """Bytes to all."""
        return sum(self.sent_bytes.values())


def ranks_of(group: Any) -> list[int]:
    """Global ranks of what the dispatcher hands over for a process group."""
    return dist.get_process_group_ranks(dist.ProcessGroup.unbox(group))  # type: ignore[attr-defined]
