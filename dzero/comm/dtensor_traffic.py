"""Traffic of a model that tp cuts: its DTensors call torch's functional collectives, not those of this package.

    operator                 kind             bytes that one of n ranks sends (comm/ledger.py)
    all_gather_into_tensor   all_gather       output minus input
    reduce_scatter_tensor    reduce_scatter   input minus output
    all_reduce               all_reduce       2 (n - 1) / n of the tensor
    any other                unknown ...      0, with a warning, because counting must not end a run

Counting them intercepts every operator, so a run counts only its first step; all later steps send the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dzero.comm.ledger import Ledger
from dzero.utils.torch_internals import COLLECTIVES, MODES, SENDS_NOTHING, intercept, tree_leaves

PHASE = "tensor"
UNKNOWN = "unknown "
"""Prefix of the kind of a collective that is not in the table, before the operator's name."""
COUNTED_ELSEWHERE = "all_to_all_single"
"""Operator of torch's ring attention, whose calls count their own traffic."""


def called_by(func: Any, args: Sequence[Any]) -> Any:
    """Return the group name of a functional collective, or None for any other operator."""
    if func.namespace != COLLECTIVES or not args:
        return None
    if func.overloadpacket.__name__ in (*SENDS_NOTHING, COUNTED_ELSEWHERE):
        return None
    return getattr(args[-1], "group_name", args[-1])


def sent_by(func: Any, args: Sequence[Any], out: Any, ranks: int) -> tuple[str, int]:
    """Return kind and sent bytes of a functional collective; warn once about each that is not in the table."""
    name = func.overloadpacket.__name__
    if name == "all_gather_into_tensor":
        return "all_gather", out.nbytes - args[0].nbytes
    if name == "reduce_scatter_tensor":
        return "reduce_scatter", args[0].nbytes - out.nbytes
    if name == "all_reduce":
        return "all_reduce", 2 * (ranks - 1) * out.nbytes // ranks
    _warn_of(name)
    return f"{UNKNOWN}{name}", 0


@cache
def _warn_of(name: str) -> None:
    warnings.warn(
        f"an operator of the model calls the collective {name}, whose bytes are not counted: measured and planned "
        "traffic leave it out",
        stacklevel=3,
    )


def dtensor_traffic(group: dist.ProcessGroup, axis: str, ledger: Ledger) -> AbstractContextManager[object]:
    """Return a context in which `ledger` counts what operators send over `group`, as traffic of `axis`.

    Where torch lacks what intercepts operators, the context counts nothing.
    """
    return intercept(partial(_counted, group, axis, ledger)) if MODES.is_there else nullcontext()


def _counted(
    group: dist.ProcessGroup,
    axis: str,
    ledger: Ledger,
    func: Any,
    types: Sequence[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run `func` and count it; DTensors are first left to dispatch to their local tensors."""
    if any(issubclass(each, DTensor) for each in types):
        return NotImplemented
    out = func(*args, **kwargs)
    if called_by(func, args) == group.group_name:
        kind, sent_bytes = sent_by(func, args, out, group.size())
        dtypes = [each.dtype for each in tree_leaves((out, args)) if isinstance(each, torch.Tensor)]
        ledger.record(PHASE, kind, axis, dtypes[0] if dtypes else torch.uint8, sent_bytes)
    return out
