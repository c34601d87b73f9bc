"""Work of single operator calls, from which a plan's seconds and bytes are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from dzero.comm.dtensor_traffic import called_by, sent_by
from dzero.mesh import CONTEXT, EXPERT, TENSOR
from dzero.utils.torch_internals import (
    COLLECTIVES,
    attention_operators,
    fp8_products,
    group_called,
    grouped_product,
    is_cast,
    tree_leaves,
)

aten = torch.ops.aten
ATTENTION, ATTENTION_BACKWARD = attention_operators(), attention_operators("_backward")
IN_FP8 = fp8_products()
GROUPED = grouped_product()
"""Products of each expert's rows with its weights, [n, k] x [experts, k, m] -> [n, m], and their gradients."""
FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    GROUPED: lambda rows, weights, *_, **__: 2 * rows.numel() * weights.shape[-1],
    **dict.fromkeys(ATTENTION, lambda *qkv, **_: _attention(sdpa_flop_count, *qkv[:3])),
    **dict.fromkeys(
        ATTENTION_BACKWARD,
        lambda *grad_qkv, **_: _attention(sdpa_backward_flop_count, *grad_qkv[1:4], grad_qkv[0]),
    ),
}
"""FLOPs of an operator call, a multiply-add as 2; torch's table lacks grouped products, CPU attention and, up to 2.11,
grouped heads."""
FUSED_CAST_BYTES = 28
"""Bytes per element that compiled code saves where torchao casts bf16 to 8 bits: operators that run one by one move 33,
and fused ones 5, since they read the operand for its scale, read it again, and write the result."""
EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
"""Operators that touch no memory."""


class OperatorWork(NamedTuple):
    """Work of operators on one rank.

    Attributes:
        flops: FLOPs of matrix products, but for those in 8 bits.
        attention: FLOPs of attention.
        bytes: Bytes that all other operators read and write.
        calls: Operator calls.
        sent, exchanges: Bytes sent in, and number of, the collectives of tensor parallelism.
        passed, passes: The same for attention over sequences cut by cp.
        routed, routes: The same for tokens sent to experts of other ranks.
        fp8_flops: FLOPs of matrix products in 8 bits.
    """

    flops: float = 0.0
    attention: float = 0.0
    bytes: float = 0.0
    calls: int = 0
    sent: float = 0.0
    exchanges: int = 0
    passed: float = 0.0
    passes: int = 0
    routed: float = 0.0
    routes: int = 0
    fp8_flops: float = 0.0

    def exchanged(self) -> Iterator[tuple[str, float, int]]:
        """Yield the bytes sent, and the number of collectives, along each axis within the model."""
        yield TENSOR, self.sent, self.exchanges
        yield CONTEXT, self.passed, self.passes
        yield EXPERT, self.routed, self.routes

    def __add__(self, more: OperatorWork) -> OperatorWork:  # type: ignore[override]
        return OperatorWork(*(a + b for a, b in zip(self, more, strict=True)))  # type: ignore[arg-type]


def work_of(func: Any, args: Any, kwargs: Any, out: Any, *, fuses_casts: bool = False) -> OperatorWork:
    """Return the work of one operator call that returned `out`; `fuses_casts` if casts to 8 bits are compiled."""
    kind = func.overloadpacket
    if func.namespace == "prim":
        return OperatorWork()  # device query of a fake tensor, which real runs do not have
    if (group := called_by(func, args)) is not None:
        return OperatorWork(calls=1, sent=sent_by(func, args, out, group_called(group).size())[1], exchanges=1)
    if func.namespace in ("c10d", COLLECTIVES):
        return OperatorWork(calls=1)  # of cp or ep, whose bytes the ledger counts; or a wait
    if (count := FLOPS.get(kind)) is not None:
        flops = count(*args, **kwargs, out_val=out)
        what = "attention" if "attention" in kind.__name__ else "fp8_flops" if kind in IN_FP8 else "flops"
        return OperatorWork(calls=1)._replace(**{what: flops})
    if func.is_view or kind in EMPTY:
        return OperatorWork(calls=1)
    touched = {id(each): each.nbytes for each in tree_leaves((args, kwargs, out)) if isinstance(each, torch.Tensor)}
    moved = sum(touched.values())
    if fuses_casts and is_cast(kind) and out.itemsize == 1 and out.is_floating_point():
        moved -= FUSED_CAST_BYTES * out.numel()
    return OperatorWork(bytes=moved, calls=1)


def _attention(
    count: Callable[..., int], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *grad: torch.Tensor
) -> int:
    """Return the FLOPs of attention on [batch, heads, tokens, head size], with grouped key and value heads expanded."""
    batch, heads, *_ = query.shape
    shapes = (query.shape, *((batch, heads, *each.shape[2:]) for each in (key, value)))
    return count(*(each.shape for each in grad), *shapes)
