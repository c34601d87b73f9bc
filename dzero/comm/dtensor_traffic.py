"""Traffic of a model that tp cuts: its DTensors call torch's functional collectives, not those of this package.

    operator                 kind             bytes that one of n ranks sends (comm/ledger.py)
    all_gather_into_tensor   all_gather       output minus input
    reduce_scatter_tensor    reduce_scatter   input minus output
    all_reduce               all_reduce       2 (n - 1) / n of the tensor

Counting them intercepts every operator, so a run counts only its first step; all later steps send the same.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dzero.comm.ledger import Ledger

PHASE = "tensor"
SILENT = ("wait_tensor", "_wrap_tensor_autograd", "all_to_all_single")
"""Operators that send nothing, and that of torch's ring attention, which the ledger counts elsewhere."""


def called_by(func: Any, args: Any) -> Any:
    """Return the group name of a functional collective, or None for any other operator."""
    if func.namespace != "_c10d_functional" or func._overloadpacket.__name__ in SILENT:
        return None
    return getattr(args[-1], "group_name", args[-1])


def sent_by(func: Any, args: Any, out: Any, ranks: int) -> tuple[str, int]:
    """Return kind and sent bytes of a functional collective; raise NotImplementedError for one not in the table."""
    name = func._overloadpacket.__name__
    if name == "all_gather_into_tensor":
        return "all_gather", out.nbytes - args[0].nbytes
    if name == "reduce_scatter_tensor":
        return "reduce_scatter", args[0].nbytes - out.nbytes
    if name == "all_reduce":
        return "all_reduce", 2 * (ranks - 1) * out.nbytes // ranks
    raise NotImplementedError(f"a model whose operators call {name} is not foreseen")


class CountDTensorTraffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode in which `ledger` counts what operators send over `group`, as traffic of `axis`."""

    def __init__(self, group: dist.ProcessGroup, axis: str, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._group, self._axis, self._ledger = group, axis, ledger

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count it; DTensors are first left to dispatch to their local tensors."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if called_by(func, args) == self._group.group_name:
            kind, sent_bytes = sent_by(func, args, out, self._group.size())
            self._ledger.record(PHASE, kind, self._axis, out.dtype, sent_bytes)
        return out
