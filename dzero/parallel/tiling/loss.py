"""Logits and their cross-entropy in tiles: [tokens, vocabulary] logits never exist, neither in forward nor in backward.

    cut along      a tile computes                           joined by
    vocabulary     log-sum-exp and the target's logit        log-sum-exp over the tiles
    tokens         the sum of its tokens' losses             addition

Both keep only the inputs of a tile, and recompute its logits in backward, where they are cut along the vocabulary in
either case (tiling/head_loss.py). No gradient is a sum over tiles in 16 bits, so that none has a larger error with more
tiles. Tiles of the vocabulary are also units, so the head's weight is gathered tile by tile. A tied head's weight is
that of the embedding, which is looked up whole, so it stays whole and is tiled along tokens. Logits have the working
dtype; log-sum-exp and loss are fp32, as with an untiled head.

A head that is given targets returns the sum of losses in place of logits. So any model whose output is what its head
returns can be tiled, without knowledge of its forward; `returns_logits_of` tries that with two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from dzero.data.batch import IGNORED
from dzero.models.hf import class_name
from dzero.models.llama import Llama
from dzero.parallel.forward_wrapping import Forward, wrap_method
from dzero.parallel.loss import sum_of_losses
from dzero.parallel.tiling.head_loss import sum_of_tiled_losses
from dzero.parallel.tiling.shared_input import input_for_each
from dzero.parallel.tiling.split_head_loss import sum_of_split_losses
from dzero.parallel.tiling.tile import tile_all, tiles_of
from dzero.utils.torch_internals import fake_tensor_limits, fake_tensors

LOGITS_BYTES = 128 << 20
"""Limit of the fp32 logits of a tile, where the number of tiles is not set."""
DTYPES_TRIED = (torch.bfloat16, None)
"""Dtypes in which a model on meta is tried; None for its own."""


def tile_loss(model: nn.Module, n: int, *, by_tokens: bool = False) -> None:
    """Make `model(tokens, targets)` return the mean cross-entropy (nats, fp32 scalar), computed in `n` tiles.

    `model(tokens)` still returns logits. targets are int64 with the shape of tokens; -100 is ignored, as in
    `torch.nn.functional.cross_entropy`.

    Args:
        model: Model that returns the logits of its head, an nn.Linear (`head_of`).
        n: Number of tiles.
        by_tokens: Cut along tokens even where the vocabulary could be cut; the head then remains one unit.

    Raises:
        ValueError: If the model has no such head, changes the head's logits, or the vocabulary of an untied head cannot
            be cut into `n` tiles.
    """
    head = head_of(model)
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"loss_tiles={n}: {class_name(model)} has no nn.Linear as its head to make its loss from; "
            "take block.loss_tiles=1"
        )
    if not returns_logits_of(model, head):
        raise ValueError(
            f"block.loss_tiles={n}: {class_name(model)} changes the logits of its head, as by a scale or a cap, "
            "which tiles of the loss would leave out, or cannot be tried; take block.loss_tiles=1"
        )
    others = (m for m in model.modules() if m is not head)
    if by_tokens or n == 1 or any(p is head.weight for m in others for p in m.parameters(recurse=False)):
        wrap_method([head], "forward", partial(_or_losses, partial(_over_tokens, n=n)))
    else:
        tile_all([head], n)
        wrap_method(tiles_of(head), "forward", _or_scores)
        wrap_method([head], "forward", partial(_or_losses, lambda _, *given: _over_vocabulary(*given)))
    head.loss_targets = None  # type: ignore[assignment]
    wrap_method([model], "forward", _or_loss)


def tile_large_loss(model: nn.Module, tokens: int, ranks: int = 1) -> None:
    """Tile the loss of a microbatch of `tokens` along tokens, so that the fp32 logits of a tile take `LOGITS_BYTES`.

    Models whose logits are smaller stay as they are, and so do those whose loss cannot be tiled. `ranks` are those that
    the vocabulary will be split over.
    """
    head = head_of(model)
    if not isinstance(head, nn.Linear):
        return
    n = math.ceil(tokens * head.out_features * torch.float32.itemsize / (LOGITS_BYTES * ranks))
    if n > 1 and returns_logits_of(model, head):
        tile_loss(model, min(n, tokens), by_tokens=True)


def head_of(model: nn.Module) -> nn.Module | None:
    """Return the module that makes the logits of a language model; None if it has none."""
    output = getattr(model, "get_output_embeddings", None)
    found = output() if callable(output) else getattr(model, "head", None)
    return found if isinstance(found, nn.Module) else None


@torch.no_grad()
def returns_logits_of(model: nn.Module, head: nn.Module) -> bool:
    """Return whether the logits that `model` returns for two tokens are those that `head` returned.

    A model on meta is run on tensors without values: in bf16, which experts of transformers demand there, and in its
    own dtypes, in which a cast of logits to fp32 changes nothing. One success is enough. A model that needs values to
    run has none. Llama is known, and its experts may be on other ranks.

    Raises:
        Exception: The model's own error, if it can be run in neither way.
    """
    if isinstance(model, Llama):
        return True
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    if not any(each.is_meta for each in tensors.values()):
        with torch.random.fork_rng(devices=[]):
            return _passes_on(model, head, {}, next(iter(tensors.values())).device)
    floats = {name for name, each in model.named_parameters() if each.is_floating_point()}
    errors: list[Exception] = []
    for dtype in DTYPES_TRIED:
        try:
            with fake_tensors():
                fake = {
                    name: torch.empty(each.shape, dtype=(dtype if name in floats else None) or each.dtype)
                    for name, each in tensors.items()
                    if each.is_meta
                }
                if _passes_on(model, head, fake, torch.device("cpu")):
                    return True
        except fake_tensor_limits():
            return False
        except Exception as error:  # a model raises any kind of error, and some raise it in one of the dtypes only
            errors.append(error)
    if len(errors) == len(DTYPES_TRIED):
        raise errors[-1]
    return False


def _passes_on(model: nn.Module, head: nn.Module, values: dict[str, Tensor], device: torch.device) -> bool:
    made: list[Tensor] = []
    hook = head.register_forward_hook(lambda _module, _inputs, out: made.append(out))
    try:
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
        logits = _logits(functional_call(model, values, (tokens,)))
    finally:
        hook.remove()
    return len(made) == 1 and logits is made[0]


def losses_of(model: nn.Module, targets: Tensor, run: Callable[[], Any]) -> Tensor:
    """Return the sum of losses (fp32 scalar) of the forward of `model` that `run` makes.

    Args:
        model: Model, tiled by `tile_loss` or not.
        targets: int64 [batch, time]; `IGNORED` does not count.
        run: Runs forward once and returns its output: logits, or an object that has them as `logits`.
    """
    head = head_of(model)
    if not hasattr(head, "loss_targets"):
        return sum_of_losses(_logits(run()), targets)
    with _given(head, targets):
        total = _logits(run())
    return total.to_local().sum() if isinstance(total, DTensor) else total  # of a split head: one for each rank


def _logits(output: Any) -> Tensor:
    logits: Tensor = getattr(output, "logits", output)
    return logits


@contextmanager
def _given(head: Any, targets: Tensor) -> Iterator[None]:
    head.loss_targets = targets
    try:
        yield
    finally:
        head.loss_targets = None


def _or_loss(forward: Forward) -> Forward:
    def with_loss(self: Any, tokens: Tensor, targets: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Return logits, or the mean loss given `targets`."""
        if targets is None:
            return forward(self, tokens, *args, **kwargs)
        total = losses_of(self, targets, lambda: forward(self, tokens, *args, **kwargs))
        return total / (targets != IGNORED).sum()

    return with_loss


def _or_losses(losses: Callable[[Forward, nn.Module, Tensor, Tensor], Tensor], forward: Forward) -> Forward:
    def with_losses(self: Any, features: Tensor) -> Any:
        """Return logits, or the sum of losses while the head has targets."""
        if self.loss_targets is None:
            return forward(self, features)
        return losses(forward, self, features, self.loss_targets.flatten())

    return with_losses


def _over_tokens(_: Forward, head: nn.Linear, features: Tensor, targets: Tensor, *, n: int) -> Tensor:
    """Return the sum of losses of features [..., hidden] and targets [tokens], in tiles of tokens."""
    if isinstance(features, DTensor):
        return sum_of_split_losses(head, features, targets, n)
    return sum_of_tiled_losses(features.flatten(0, -2), head.weight, head.bias, targets, n)


def _over_vocabulary(head: nn.Module, features: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of losses of features [..., hidden]; raise IndexError if a target [tokens] is no id."""
    features = features.flatten(0, -2)
    tiles = tiles_of(head)
    out_features = [int(tile.out_features) for tile in tiles]  # type: ignore[arg-type]
    sizes = torch.tensor(out_features, device=targets.device)
    counted = targets != IGNORED
    ids = targets.where(counted, 0)
    tile_of_id = torch.arange(len(tiles), device=targets.device).repeat_interleave(sizes, output_size=sum(out_features))
    tile_of_target = tile_of_id.index_select(0, ids)
    within = ids - (sizes.cumsum(0) - sizes)[tile_of_target]
    log_sums, target_logit = [], torch.zeros(ids.shape, device=targets.device)
    read = input_for_each(features)
    for index, tile in enumerate(tiles):
        has_target = tile_of_target == index
        log_sum, logit = tile(read(), within.where(has_target, 0))
        log_sums.append(log_sum)
        target_logit = torch.where(has_target, logit, target_logit)
    losses = torch.stack(log_sums).logsumexp(0) - target_logit
    return losses.where(counted, 0.0).sum()


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
