"""Loss in tiles of a head whose vocabulary is split over ranks (tensor parallelism).

    forward     tile of tokens: this rank's logits, and of each token two numbers: their log-sum-exp, and the target's
                logit if the rank has it
                all tokens: one all-gather of these; log-sum-exp over the ranks
    backward    tile of this rank's vocabulary (head_loss.py): p = exp(logits - log-sum-exp) - onehot(target);
                dw = p^T x; db = sum(p); dx += p w

Of dx each rank has the summand of its own logits. Logits have the working dtype; everything after them is fp32, as
without tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dzero.data.batch import IGNORED
from dzero.parallel.tiling.head_loss import grads_in_tiles


@dataclass(frozen=True)
class VocabularySplit:
    """The ids that this rank has of a vocabulary that is split evenly.

    Attributes:
        rank: Index of the rank.
        ids: Number of ids of all ranks.
        gather: Function that gathers a tensor [...] of every rank as [ranks, ...].
    """

    rank: int
    ids: int
    gather: Callable[[Tensor], Tensor]


def sum_of_split_losses(head: nn.Linear, features: DTensor, targets: Tensor, n: int) -> DTensor:
    """Return the sum of the cross-entropies of a split head's logits, in nats: fp32 [ranks], one for each rank.

    All are the same sum. It is not a scalar, because torch's styles split what the head returns along its last dim.

    Args:
        head: The head, its weight split along the vocabulary.
        features: Inputs of the head [..., hidden], whole on every rank.
        targets: int64 [tokens]; `IGNORED` does not count.
        n: Number of tiles.

    Raises:
        ValueError: If the features or the weight are split otherwise.
        IndexError: If a target is no id; on CUDA, an assertion on the device instead.
    """
    weight, bias, mesh = head.weight, head.bias, features.device_mesh
    is_split = isinstance(weight, DTensor) and weight.placements == (Shard(0),)
    if not isinstance(weight, DTensor) or not is_split or features.placements != (Replicate(),):
        raise ValueError(
            f"block.loss_tiles: a head with weights {getattr(weight, 'placements', 'not split')} and inputs "
            f"{features.placements} is not split along the vocabulary; take block.loss_tiles=1"
        )

    def gather(part: Tensor) -> Tensor:
        rows = DTensor.from_local(part.unsqueeze(0), mesh, [Shard(0)], run_check=False)
        gathered: Tensor = rows.redistribute(placements=[Replicate()]).to_local()
        return gathered

    split = VocabularySplit(mesh.get_local_rank(), weight.shape[0], gather)
    rows = features.to_local(grad_placements=[Partial()]).flatten(0, -2)
    own_bias = bias.to_local() if isinstance(bias, DTensor) else bias
    loss: Any = _SplitTiledLoss.apply
    total: Tensor = loss(rows, weight.to_local(), own_bias, targets, n, split)
    return DTensor.from_local(torch.stack([total]), mesh, [Shard(0)], run_check=False)


class _SplitTiledLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        n: int,
        split: VocabularySplit,
    ) -> Tensor:
        counted, vocabulary = targets != IGNORED, len(weight)
        ids = targets.where(counted, 0)
        owner = torch.arange(split.ids, device=ids.device) // vocabulary
        is_own = (owner.index_select(0, ids) == split.rank) & counted
        own_ids = (ids - split.rank * vocabulary).where(is_own, 0)
        found = torch.zeros(2, len(ids), device=features.device)
        start = 0
        for part in features.chunk(n):
            rows = slice(start, start + len(part))
            logits = F.linear(part, weight, bias).float()
            found[0, rows] = logits.logsumexp(-1)
            found[1, rows] = logits.gather(1, own_ids[rows].unsqueeze(1)).squeeze(1).where(is_own[rows], 0.0)
            start += len(part)
        log_sums, picked = split.gather(found).unbind(1)
        log_sum = log_sums.logsumexp(0)
        ctx.save_for_backward(features, weight, bias, counted, own_ids, is_own, log_sum)
        ctx.n = n
        total: Tensor = (log_sum - picked.sum(0)).where(counted, 0.0).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        features, weight, bias, counted, own_ids, is_own, log_sum = ctx.saved_tensors

        def softmax(logits: Tensor) -> Tensor:
            return logits.sub_(log_sum.unsqueeze(1)).exp_()

        ids = own_ids.where(is_own, -1)
        wanted = ctx.needs_input_grad[:3]
        grads = grads_in_tiles(features, weight, bias, ctx.n, wanted, softmax, ids, grad * counted)
        return (*grads, None, None, None)
