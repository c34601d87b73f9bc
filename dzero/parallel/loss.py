"""Loss of a language model: the sum of its tokens' cross-entropies, in nats.

The loss of a step is the mean over the tokens that count, of all its microbatches and ranks. A microbatch therefore
divides its sum by the mean number of such tokens per microbatch, which is the same on every rank
(`Trainer`); a mean of the microbatches' own means would weight their tokens differently.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional

from dzero.data.batch import IGNORED


def sum_of_losses(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropies of the tokens that count, an fp32 scalar.

    Args:
        logits: [batch, time, vocab], whole, or split along the vocabulary inside `TensorParallel.loss`.
        targets: int64 [batch, time]; `IGNORED` does not count.
    """
    loss = functional.cross_entropy(
        logits.float().flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return loss.to_local() if isinstance(loss, DTensor) else loss
