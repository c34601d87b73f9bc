"""Logits and their cross-entropy in tiles: [tokens, vocabulary] logits never exist, neither in forward nor in backward.

    head                cut along      a tile computes                           joined by
    untied              vocabulary     log-sum-exp and the target's logit        log-sum-exp over the tiles
    tied (embedding)    tokens         the sum of its tokens' losses             addition

Both keep only the inputs of a tile, and recompute its logits in backward. Tiles of the vocabulary are also units, so
the head's weight is gathered tile by tile. A tied head's weight is that of the embedding, which is looked up whole, so
it stays whole. Logits have the working dtype; log-sum-exp and loss are fp32, as with an untiled head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dzero.parallel.forward_wrapping import Forward, wrap_method
from dzero.parallel.tiling.tile import tile_all, tiles_of

IGNORED = -100


def tile_loss(model: nn.Module, n: int) -> None:
    """Make `model(tokens, targets)` return the mean cross-entropy (nats, fp32 scalar), computed in `n` tiles.

    `model(tokens)` still returns logits. targets are int64 with the shape of tokens; -100 is ignored, as in
    `torch.nn.functional.cross_entropy`.

    Args:
        model: Has `features(tokens)` [..., hidden] and an nn.Linear `head`; its forward is `head(features(tokens))`.
        n: Number of tiles.

    Raises:
        ValueError: If the model does not have these, or the vocabulary of an untied head cannot be cut into `n` tiles.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, nn.Linear) or not hasattr(model, "features"):
        raise ValueError(
            f"loss_tiles={n}: {type(model).__name__} has no features() and head to make its loss from; "
            "take block.loss_tiles=1"
        )
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    others = (m for m in model.modules() if m is not head)
    if n == 1 or any(p is head.weight for m in others for p in m.parameters(recurse=False)):
        loss = partial(_over_tokens, n=n)
    else:
        tile_all([head], n)
        wrap_method(tiles_of(head), "forward", _or_scores)
        loss = _over_vocabulary
    wrap_method([model], "forward", partial(_or_loss, loss))


def _or_loss(loss: Callable[[nn.Module, Tensor, Tensor], Tensor], forward: Forward) -> Forward:
    def with_loss(self: Any, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, or the loss given `targets`; runs inside the model's call, where its units are gathered."""
        if targets is None:
            logits: Tensor = forward(self, tokens)
            return logits
        return loss(self.head, self.features(tokens).flatten(0, -2), targets.flatten())

    return with_loss


def _over_tokens(head: nn.Module, features: Tensor, targets: Tensor, *, n: int) -> Tensor:
    """Return the mean loss of features [tokens, hidden] and targets [tokens], in tiles of tokens."""
    total = torch.zeros((), device=features.device)
    for part, of_part in zip(features.chunk(n), targets.chunk(n), strict=True):
        total = total + checkpoint(_sum_of_losses, head, part, of_part, use_reentrant=False)
    return total / (targets != IGNORED).sum()


def _sum_of_losses(head: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(features).float(), targets, reduction="sum", ignore_index=IGNORED)


def _over_vocabulary(head: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of features [tokens, hidden]; raise IndexError if a target [tokens] is no id."""
    tiles = tiles_of(head)
    out_features = [int(tile.out_features) for tile in tiles]  # type: ignore[arg-type]
    sizes = torch.tensor(out_features, device=targets.device)
    counted = targets != IGNORED
    ids = targets.where(counted, 0)
    tile_of_id = torch.arange(len(tiles), device=targets.device).repeat_interleave(sizes, output_size=sum(out_features))
    tile_of_target = tile_of_id.index_select(0, ids)
    within = ids - (sizes.cumsum(0) - sizes)[tile_of_target]
    log_sums, target_logit = [], torch.zeros(ids.shape, device=targets.device)
    for index, tile in enumerate(tiles):
        has_target = tile_of_target == index
        log_sum, logit = tile(features, within.where(has_target, 0))
        log_sums.append(log_sum)
        target_logit = torch.where(has_target, logit, target_logit)
    losses = torch.stack(log_sums).logsumexp(0) - target_logit
    return losses.where(counted, 0.0).sum() / counted.sum()


def _or_scores(forward: Forward) -> Forward:
    def scores(self: nn.Module, features: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-sum-exp of a tile's logits and the logit at `ids`, both fp32 [tokens]."""
        logits = forward(self, features).float()
        picked = logits.gather(-1, ids.unsqueeze(-1)).sum(-1)  # not squeezed, as FSDP2 accepts no views
        return logits.logsumexp(-1), picked

    def with_scores(self: nn.Module, features: Tensor, ids: Tensor | None = None) -> Any:
        """Return logits, or what the loss needs of them given `ids` within the tile."""
        if ids is None:
            return forward(self, features)
        return checkpoint(scores, self, features, ids, use_reentrant=False)

    return with_scores
