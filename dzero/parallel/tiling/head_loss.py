"""Loss of a head in tiles, as one operator: logits of a tile are made in forward, and again in backward.

    forward     tile of tokens: logits = x w^T + b; of each token the largest logit and the log of the sum of
                exp(logit - largest), and the sum of the cross-entropies
    backward    tile of the vocabulary: p = softmax(logits) - onehot(target); dw = p^T x; db = sum(p); dx += p w

With these two numbers of each token, 8 bytes, backward needs no whole rows of logits. So it cuts along the vocabulary:
each row of the weight's gradient is one product over all tokens, rounded once, as without tiles. In tiles of tokens it
would be a sum over tiles, whose error grows with their number in 16 bits, and which takes twice the memory in fp32.

The gradient of features is a sum over tiles, in fp32 and rounded once. For 16-bit features it takes 4 more bytes for
each of [tokens, hidden] in backward, and 2 for the summand. Of autograd's sums for a loop of tiles, each would take the
memory of the weight, which is larger than a tile of logits.
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
        counted = targets != IGNORED
        ids = torch.arange(len(weight), device=targets.device).index_select(0, targets.where(counted, 0))  # checks them
        largest, log_sum = torch.empty(2, len(features), 1, device=features.device).unbind()
        total = torch.zeros((), device=features.device)
        start = 0
        for part in features.chunk(n):
            rows = slice(start, start + len(part))
            logits = F.linear(part, weight, bias).float()
            torch.amax(logits, 1, keepdim=True, out=largest[rows])
            logits -= largest[rows]
            picked = logits.gather(1, ids[rows].unsqueeze(1))
            torch.log(logits.exp_().sum(1, keepdim=True), out=log_sum[rows])
            total += (log_sum[rows] - picked).squeeze(1).where(counted[rows], 0.0).sum()
            start += len(part)
        ctx.save_for_backward(features, weight, bias, counted, ids, largest, log_sum)
        ctx.n = n
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, counted, ids, largest, log_sum = ctx.saved_tensors

        def softmax(logits: Tensor) -> Tensor:
            return logits.sub_(largest).sub_(log_sum).exp_()

        wanted = ctx.needs_input_grad[:3]
        return (*grads_in_tiles(features, weight, bias, ctx.n, wanted, softmax, ids, grad * counted), None, None)


def grads_in_tiles(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    n: int,
    wanted: Sequence[bool],
    softmax: Callable[[Tensor], Tensor],
    ids: Tensor,
    of_losses: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of features, weight and bias, where they are wanted, in tiles of the vocabulary.

    Args:
        features: Inputs of the head [tokens, hidden].
        weight: Weight of the head [vocabulary, hidden], or this rank's rows of it.
        bias: Bias of these rows [vocabulary], or None.
        n: Number of tiles.
        wanted: Which of the three gradients are wanted.
        softmax: Turns logits of a tile, fp32 [tokens, ids of the tile], into probabilities, in place.
        ids: Row of each token's target, int64 [tokens]; one that is no row where another rank has it.
        of_losses: Gradient of each token's loss, fp32 [tokens]; 0 where it does not count.
    """
    of_weight = torch.empty_like(weight) if wanted[1] else None
    of_bias = torch.empty_like(bias) if wanted[2] and bias is not None else None
    sum_of_features = _Sum(features) if wanted[0] else None
    start = 0
    for rows in weight.chunk(n):
        tile = slice(start, start + len(rows))
        logits = F.linear(features, rows, None if bias is None else bias[tile])
        grad = _grad_of_logits(logits, softmax, ids - start, of_losses)
        if sum_of_features is not None:
            sum_of_features.add_product(grad, rows)
        if of_weight is not None:
            torch.mm(grad.t(), features, out=of_weight[tile])
        if of_bias is not None:
            torch.sum(grad, 0, out=of_bias[tile])
        start += len(rows)
    return None if sum_of_features is None else sum_of_features.rounded(), of_weight, of_bias


class _Sum:
    """Sum of products with the shape of `like`, in fp32 if there are several, and in its dtype once `rounded`."""

    def __init__(self, like: Tensor) -> None:
        self._dtype = like.dtype
        self._total: Tensor | None = None

    def add_product(self, one: Tensor, other: Tensor) -> None:
        """Add the product of two matrices."""
        if self._total is None:
            self._total = torch.mm(one, other)
        elif self._dtype == torch.float32:
            self._total.addmm_(one, other)
        else:
            self._total = self._total.float().add_(torch.mm(one, other))

    def rounded(self) -> Tensor:
        """Return the sum."""
        assert self._total is not None
        return self._total.to(self._dtype)


def _grad_of_logits(logits: Tensor, softmax: Callable[[Tensor], Tensor], ids: Tensor, of_losses: Tensor) -> Tensor:
    """Return the gradient of a tile's logits [tokens, ids] in their dtype; `ids` count from the tile's first one."""
    probabilities = softmax(logits.float())
    is_here = (ids >= 0) & (ids < logits.shape[1])
    places = ids.where(is_here, 0).unsqueeze(1)
    probabilities.scatter_add_(1, places, -is_here.unsqueeze(1).to(probabilities.dtype))
    return probabilities.mul_(of_losses.unsqueeze(1)).to(logits.dtype)
