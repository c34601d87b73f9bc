"""Logits and their cross-entropy in tiles: the [tokens, vocabulary] logits never exist, neither forward nor backward.

    head                cut along      a tile gives                              joined by
    of its own          vocabulary     log-sum-exp and the target's logit        the log-sum-exp of the tiles'
    tied (embedding)    tokens         the sum of its tokens' losses             addition

Both keep a tile's inputs alone, and compute its logits again in backward. Tiles of the vocabulary are units as well:
the head's weight is gathered tile by tile. A tied head's weight is the embedding's, which is looked up whole, so it
stays whole. Logits are made in the working dtype; log-sum-exp and loss are fp32, as with an untiled head.
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
    """From now on `model(tokens, targets)` is the mean cross-entropy [nats, fp32 scalar], made in `n` tiles.

    targets: int64 of tokens' shape; -100 is left out, as by `functional.cross_entropy`. `model(tokens)` still gives
    logits. model: has `features(tokens)` [..., hidden] and `head`, an nn.Linear, of which `head(features(tokens))` is
    its forward. Raises ValueError for another model, n < 1, and more tiles than the vocabulary of a head of its own.
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
        """Logits, or with `targets` the loss; inside the model's call, where its units are gathered."""
        if targets is None:
            logits: Tensor = forward(self, tokens)
            return logits
        return loss(self.head, self.features(tokens).flatten(0, -2), targets.flatten())

    return with_loss


def _over_tokens(head: nn.Module, features: Tensor, targets: Tensor, *, n: int) -> Tensor:
    """features [tokens, hidden], targets [tokens] -> mean loss."""
    total = torch.zeros((), device=features.device)
    for part, of_part in zip(features.chunk(n), targets.chunk(n), strict=True):
        total = total + checkpoint(_sum_of_losses, head, part, of_part, use_reentrant=False)
    return total / (targets != IGNORED).sum()


def _sum_of_losses(head: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(features).float(), targets, reduction="sum", ignore_index=IGNORED)


def _over_vocabulary(head: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    """features [tokens, hidden], targets [tokens] -> mean loss. Raises IndexError for a target that is no id."""
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
        """Of a tile's logits: log-sum-exp and the one at `ids`, both fp32 [tokens]."""
        logits = forward(self, features).float()
        picked = logits.gather(-1, ids.unsqueeze(-1)).sum(-1)  # not squeezed: FSDP2 wants no views
        return logits.logsumexp(-1), picked

    def with_scores(self: nn.Module, features: Tensor, ids: Tensor | None = None) -> Any:
        """Logits, or with `ids` (ids within the tile) what the loss needs of them."""
        if ids is None:
            return forward(self, features)
        return checkpoint(scores, self, features, ids, use_reentrant=False)

    return with_scores
