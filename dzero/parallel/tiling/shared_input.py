"""Input that several tiles read, whose gradient is the sum of theirs: added in fp32, and rounded once.

Autograd adds the gradients of a tensor's uses in the tensor's dtype, so that in 16 bits the error would grow with the
number of tiles. Here every tile reads the same memory, but hands its gradient to a stand-in of dtype fp32:

    x -> stand-in (fp32, without memory) -> tile 0: x, tile 1: x, ...

In backward, the sum so far takes 4 bytes for each element of x in place of 2, and the summand another 4. Nothing else
is kept, and with an fp32 input there is no stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def input_for_each(x: Tensor) -> Callable[[], Tensor]:
    """Return a function that returns `x` for one more reader, in the same memory."""
    if x.dtype == torch.float32 or not (x.requires_grad and torch.is_grad_enabled()):
        return lambda: x
    sum_of_grads, values = _StandIn.apply(x), x.detach()  # type: ignore[no-untyped-call]
    return lambda: _Read.apply(sum_of_grads, values)  # type: ignore[no-untyped-call]


class _StandIn(torch.autograd.Function):
    """Make a tensor of dtype fp32 without memory whose gradient, once rounded, is that of the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return torch.zeros((), device=x.device).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.to(ctx.dtype)


class _Read(torch.autograd.Function):
    """Return `values`; their gradient goes to the stand-in."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.float(), None
