"""Loss of a head in tiles of tokens, as one operator: logits of a tile are made in forward, and again in backward.

    forward     tile: logits = x w^T + b, and the sum of their cross-entropies
    backward    tile: p = softmax(logits) - onehot(target); dx = p w; dw += p^T x; db += sum(p)

Gradients of the weight are added in place, tile by tile, in its dtype. Autograd would hold the sum so far, the next
summand, and their sum, each as large as the weight, which is larger than a tile of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from dzero.data.batch import IGNORED


def sum_of_tiled_losses(features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, n: int) -> Tensor:
    """Return the sum of the cross-entropies of a head's logits, an fp32 scalar in nats.

    Args:
        features: Inputs of the head [tokens, hidden].
        weight: Weight of the head [vocabulary, hidden].
        bias: Bias of the head [vocabulary], or None.
        targets: int64 [tokens]; `IGNORED` does not count.
        n: Number of tiles.

    Raises:
        IndexError: If a target is no id; on CUDA, an assertion on the device instead.
    """
    total: Tensor = _TiledLoss.apply(features, weight, bias, targets, n)  # type: ignore[no-untyped-call]
    return total


class _TiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(features, weight, bias, targets)
        ctx.n = n
        total = torch.zeros((), device=features.device)
        for part, of_part in zip(features.chunk(n), targets.chunk(n), strict=True):
            logits = F.linear(part, weight, bias).float()
            total += F.cross_entropy(logits, of_part, reduction="sum", ignore_index=IGNORED)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, targets = ctx.saved_tensors

        def of_logits(logits: Tensor, rows: slice) -> Tensor:
            return _grad_of_logits(logits, targets[rows], grad)

        wanted = ctx.needs_input_grad[:3]
        return (*grads_in_tiles(features, weight, bias, ctx.n, wanted, of_logits), None, None)


def grads_in_tiles(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n: int,
    wanted: Sequence[bool],
    of_logits: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of features [tokens, hidden], weight [vocabulary, hidden] and bias, where they are wanted.

    `of_logits` returns the gradient of a tile's logits, from the logits [rows, vocabulary] and their rows.
    """
    of_features = torch.empty_like(features) if wanted[0] else None
    of_weight = torch.zeros_like(weight) if wanted[1] else None
    of_bias = torch.zeros_like(bias) if wanted[2] and bias is not None else None
    start = 0
    for part in features.chunk(n):
        grad = of_logits(F.linear(part, weight, bias), slice(start, start + len(part)))
        if of_features is not None:
            torch.mm(grad, weight, out=of_features[start : start + len(part)])
        if of_weight is not None:
            of_weight.addmm_(grad.t(), part)
        if of_bias is not None:
            of_bias += grad.sum(0)
        start += len(part)
    return of_features, of_weight, of_bias


def _grad_of_logits(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of a tile's logits in their dtype, for the gradient `grad` of the sum."""
    counted = (targets != IGNORED).unsqueeze(1)
    ids = targets.unsqueeze(1).where(counted, 0)
    probabilities = logits.float().softmax(-1)
    probabilities.scatter_add_(1, ids, torch.full_like(ids, -1, dtype=probabilities.dtype))
    return probabilities.mul_(grad * counted).to(logits.dtype)
