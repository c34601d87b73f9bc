"""Collectives of CUDA tensors among several processes on one GPU, which nccl refuses: staged through gloo.

`staged_lanes.py` says how an operation travels and what it keeps of nccl's promises; here are the operations.

Note: why kernels of the dispatcher and no subclass of `ProcessGroup`. C++ calls a Python subclass for some of its
methods only: it would be passed by where `_allgather_base` and `_reduce_scatter_base` are called on the base class, as
dzero calls them. Every way into a collective, from Python or C++, ends at an operator `c10d::...`, whose names and
arguments are the same from torch 2.11 to 2.13. These are replaced for one type of device, by `staged`.

Reductions gather the parts and fold them in rank order, in their own dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from staged_lanes import Lanes
from torch import Tensor

BACKEND = "staged"
"""The name for `init_process_group`, as in "cpu:gloo,cuda:staged"."""
FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.RedOpType.SUM: torch.add,
    dist.ReduceOp.RedOpType.AVG: torch.add,
    dist.ReduceOp.RedOpType.PRODUCT: torch.mul,
    dist.ReduceOp.RedOpType.MIN: torch.minimum,
    dist.ReduceOp.RedOpType.MAX: torch.maximum,
}
"""How two parts are reduced; other operations are a KeyError."""


@contextmanager
def staged(device: torch.device) -> Iterator[None]:
    """Stage every collective of tensors on this type of device while inside; groups are made and ended inside."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _gloo, devices=["cpu", "cuda"])
    lanes = Lanes(device)
    library = torch.library.Library("c10d", "IMPL", device.type.upper())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Warning only once for all operators", UserWarning)  # as is meant
            for name, kernel in KERNELS.items():
                library.impl(name, partial(kernel, lanes))
        yield
    finally:
        library._destroy()
        lanes.close()


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Return the gloo of a staged group: one of its own, whose order no collective of CPU tensors disturbs."""
    return dist.ProcessGroupGloo(store, rank, size, timeout)  # type: ignore[attr-defined]


def _bytes(tensor: Tensor) -> Tensor:
    """gloo lacks some dtypes, and needs none of them to move data."""
    return tensor.reshape(-1).view(torch.uint8)


def gathered(gloo: Any, part: Tensor) -> list[Tensor]:
    """Return the part of every rank, in rank order; all are as large as this one."""
    if not part.numel():
        return [part] * gloo.size()
    found = [torch.empty_like(_bytes(part)) for _ in range(gloo.size())]
    gloo.allgather([found], [_bytes(part)]).wait()
    return [each.view(part.dtype).view(part.shape) for each in found]


def turn(gloo: Any, target: Tensor, source: Tensor, take: Sequence[int], give: Sequence[int]) -> None:
    """Send rank r its part of `source`, and write what came from it at its place in `target`.

    take, give: rows from and for each rank; empty where all are alike.
    """

    def counts(tensor: Tensor, rows: Sequence[int]) -> list[int]:
        row_bytes = tensor.nbytes // len(tensor) if len(tensor) else 0
        return [count * row_bytes for count in rows or [len(tensor) // gloo.size()] * gloo.size()]

    gloo.alltoall_base(_bytes(target), _bytes(source), counts(target, take), counts(source, give)).wait()


def folded(parts: Sequence[Tensor], boxed: Any) -> Tensor:
    """Return the parts reduced in rank order, rounded in their dtype after each step, as a ring of nccl's rounds."""
    op, total = dist.ReduceOp.RedOpType(boxed.op()), parts[0].clone()
    for part in parts[1:]:
        total = FOLDS[op](total, part)
    return total / len(parts) if op == dist.ReduceOp.RedOpType.AVG else total


def _all_reduce(
    lanes: Lanes, tensors: list[Tensor], group: Any, op: Any, _: object, async_op: bool = True, __: int = -1
) -> Any:
    return tensors, _all_reduce_coalesced(lanes, tensors, group, op, async_op, 0)


def _all_reduce_coalesced(
    lanes: Lanes, tensors: list[Tensor], group: Any, op: Any, async_op: bool = True, _: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(folded(gathered(gloo, source), op))

    return lanes.begin(group, tensors, tensors, exchange, now=not async_op)


def _reduce(
    lanes: Lanes, tensors: list[Tensor], group: Any, op: Any, root: int, _: int, async_op: bool = True, __: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        every = gathered(gloo, sources[0])
        targets[0].copy_(folded(every, op) if gloo.rank() == root else sources[0])

    return lanes.begin(group, tensors, tensors, exchange, now=not async_op)


def _all_gather(
    lanes: Lanes, outputs: list[list[Tensor]], inputs: list[Tensor], group: Any, async_op: bool = True, _: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for target, part in zip(targets, gathered(gloo, sources[0]), strict=True):
            target.copy_(part.view(target.shape))

    return outputs, lanes.begin(group, inputs, outputs[0], exchange, now=not async_op)


def _all_gather_coalesced(
    lanes: Lanes, outputs: list[Tensor], inputs: list[Tensor], group: Any, async_op: bool = True
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(torch.stack(gathered(gloo, source)).view(target.shape))

    return lanes.begin(group, inputs, outputs, exchange, now=not async_op)


def _all_gather_single(
    lanes: Lanes, output: Tensor, given: Tensor, group: Any, async_op: bool = True, _: int = -1
) -> tuple[Tensor, Any]:
    return output, _all_gather_coalesced(lanes, [output], [given], group, async_op)


def _reduce_scatter_coalesced(
    lanes: Lanes, outputs: list[Tensor], inputs: list[Tensor], group: Any, op: Any, async_op: bool = True, _: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        for source, target in zip(sources, targets, strict=True):
            parts = source.view(gloo.size(), -1)
            came = torch.empty_like(parts)
            turn(gloo, came, parts, [], [])
            target.copy_(folded([*came.unbind()], op).view(target.shape))

    return lanes.begin(group, inputs, outputs, exchange, now=not async_op)


def _reduce_scatter_single(
    lanes: Lanes, output: Tensor, given: Tensor, group: Any, op: Any, async_op: bool = True, _: int = -1
) -> tuple[Tensor, Any]:
    return output, _reduce_scatter_coalesced(lanes, [output], [given], group, op, async_op, 0)


def _reduce_scatter(
    lanes: Lanes,
    outputs: list[Tensor],
    inputs: list[list[Tensor]],
    group: Any,
    op: Any,
    async_op: bool = True,
    _: int = -1,
) -> Any:
    whole = torch.stack([*inputs[0]])
    return outputs, _reduce_scatter_coalesced(lanes, outputs, [whole], group, op, async_op, 0)


def _all_to_all_single(
    lanes: Lanes,
    output: Tensor,
    given: Tensor,
    group: Any,
    take: list[int],
    give: list[int],
    async_op: bool = True,
    _: int = -1,
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        turn(gloo, targets[0], sources[0], take, give)

    return lanes.begin(group, [given], [output], exchange, now=not async_op)


def _broadcast(
    lanes: Lanes, tensors: list[Tensor], group: Any, root: int, _: int, async_op: bool = True, __: int = -1
) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], targets: list[Tensor]) -> None:
        targets[0].copy_(sources[0])
        if sources[0].numel():
            gloo.broadcast(_bytes(targets[0]), root).wait()

    return tensors, lanes.begin(group, tensors, tensors, exchange, now=not async_op)


def _barrier(lanes: Lanes, _: Tensor, group: Any, __: list[int], async_op: bool = True, ___: int = -1) -> Any:
    return lanes.begin(group, [], [], lambda gloo, *_: gloo.barrier().wait(), now=not async_op)


def _send(lanes: Lanes, tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    def exchange(gloo: Any, sources: list[Tensor], _: list[Tensor]) -> None:
        gloo.send([_bytes(each) for each in sources], peer, tag).wait()

    return lanes.begin(group, tensors, [], exchange, lane=f"to {peer}")


def _receive(lanes: Lanes, tensors: list[Tensor], group: Any, peer: int, tag: int) -> Any:
    def exchange(gloo: Any, _: list[Tensor], targets: list[Tensor]) -> None:
        gloo.recv([_bytes(each) for each in targets], peer, tag).wait()

    return lanes.begin(group, [], tensors, exchange, lane=f"from {peer}")


KERNELS: dict[str, Callable[..., Any]] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce_coalesced,
    "reduce_": _reduce,
    "allgather_": _all_gather,
    "_allgather_base_": _all_gather_single,
    "allgather_into_tensor_coalesced_": _all_gather_coalesced,
    "reduce_scatter_": _reduce_scatter,
    "_reduce_scatter_base_": _reduce_scatter_single,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_coalesced,
    "alltoall_base_": _all_to_all_single,
    "broadcast_": _broadcast,
    "barrier": _barrier,
    "send": _send,
    "recv_": _receive,
}
"""By the names of torch's operators; others raise what gloo raises for CUDA tensors."""
