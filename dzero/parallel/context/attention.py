"""Causal attention over sequences that are cut over ranks (zigzag.py says how), forward and backward.

    kind        moves forward, per layer             backward             a rank then computes
    all_gather  keys and values: gathered            added where they     all heads of its own queries
                                                     came from
    ulysses     queries, keys, values: from a part   the same, reversed   its heads of all queries
                of every head to all of some heads;
                what comes out: back
    ring        keys and values: of one rank after   the same, and     all heads of its own queries
                another (ring.py)                    gradients

Ulysses (Jacobs et al. 2023) moves less with many ranks, but they must divide the heads; all_gather moves keys and
values alone, of which grouped queries have few, and takes any number of ranks; ring moves more than that, but while it
computes, and never holds more than two ranks' keys.

Note: prefixes without masks of time x time. Chunk c of all_gather sees the keys up to its own end, aligned at the
right. Flash attention on CUDA does just that; the way to it that torch documents, `nn.attention.bias`, fails inside
selective checkpoints. Other kernels know a causal square, or masks: so queries go in tiles of `TILE_TOKENS`, and all
tiles, layers and microbatches share one mask of tile x time, of which a shorter prefix takes the right part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from dzero.comm.context_exchange import ContextExchange
from dzero.parallel.context.ring import Ring
from dzero.parallel.context.zigzag import chunks_of, cut, joined
from dzero.parallel.divisibility import check_heads

TILE_TOKENS = 256


class ContextAttention(Protocol):
    """query [batch, heads, time, dim], key and value [batch, kv_heads, time, dim] of this rank's tokens -> as query."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """All ranks of the axis call it, in the same order."""


class AllGather:
    """Every rank's queries over the keys and values of all ranks."""

    def __init__(self, exchange: ContextExchange) -> None:
        self._exchange, self._masks = exchange, Masks()

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `ContextAttention`."""
        keys, values = _Gathered.apply(key, value, self._exchange)  # type: ignore[no-untyped-call]
        ours = chunks_of(self._exchange.rank, self._exchange.ranks)
        mixed: list[Tensor] = []
        self._masks.tokens = keys.shape[2]
        for chunk, queries in zip(ours, query.chunk(2, dim=2), strict=True):
            end = (chunk + 1) * queries.shape[2]
            mixed += over_prefix(queries, keys[:, :, :end], values[:, :, :end], self._masks)
        return torch.cat(mixed, dim=2)


class Ulysses:
    """Some heads of every rank's queries."""

    def __init__(self, exchange: ContextExchange) -> None:
        self._exchange = exchange

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `ContextAttention`. Raises ValueError for heads that the ranks do not divide."""
        ranks = self._exchange.ranks
        check_heads(query.shape[1], key.shape[1], ranks)
        ours = [each.view(len(each), ranks, -1, *each.shape[2:]) for each in (query, key, value)]
        sizes = [each.shape[2] for each in ours]
        whole = _ToHeads.apply(torch.cat(ours, dim=2).transpose(0, 1), self._exchange)  # type: ignore[no-untyped-call]
        query, key, value = whole.split(sizes, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=_grouped(query, key))
        back: Tensor = _ToSequence.apply(mixed, self._exchange)  # type: ignore[no-untyped-call]
        return back.transpose(0, 1).flatten(1, 2)


ATTENTIONS: dict[str, Callable[[ContextExchange], ContextAttention]] = {
    "all_gather": AllGather,
    "ulysses": Ulysses,
    "ring": Ring,
}


def _grouped(query: Tensor, key: Tensor) -> bool:
    return query.shape[1] != key.shape[1]


class Masks:
    """The one mask that all tiles share, made anew for other `tokens` (of a whole sequence), another dtype or device.

    Never for a shorter prefix, though it would do: what is made again in backward must be what was made in forward.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._mask = torch.empty(0, 0)

    def of(self, tile: Tensor, keys: int) -> Tensor:
        """[tile's tokens, keys]: 0 where a query sees a key, the last query all of them; else -inf."""
        mask = self._mask
        if mask.shape[1] != self.tokens or mask.dtype != tile.dtype or mask.device != tile.device:
            with torch.inference_mode(False):  # training takes the mask that an evaluation made
                unseen = torch.full((TILE_TOKENS, self.tokens), -torch.inf, dtype=tile.dtype, device=tile.device)
                mask = self._mask = unseen.triu(self.tokens - TILE_TOKENS + 1)
        return mask[-tile.shape[2] :, self.tokens - keys :]


def over_prefix(query: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Iterator[Tensor]:
    """query [batch, heads, time, dim], the last of the keys' tokens, over keys and values [batch, kv_heads, >= time,
    dim]: what comes out, tile by tile."""
    time, length, grouped = query.shape[2], keys.shape[2], _grouped(query, keys)
    if time == length:
        yield F.scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=grouped)
        return
    if _has_flash(query, keys, values):
        yield torch.ops.aten._scaled_dot_product_flash_attention(query, keys, values, is_causal=True)[0]
        return
    for start in range(0, time, TILE_TOKENS):
        tile = query[:, :, start : start + TILE_TOKENS]
        end = length - time + start + tile.shape[2]
        seen = keys[:, :, :end], values[:, :, :end]
        yield F.scaled_dot_product_attention(tile, *seen, attn_mask=masks.of(tile, end), enable_gqa=grouped)


def _has_flash(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """On CUDA, where head_dim needs no padding; a causal prefix is no question that torch answers, so none is asked."""
    if not query.is_cuda or query.shape[-1] % 8:
        return False
    params = SDPAParams(query, keys, values, None, 0.0, False, _grouped(query, keys))
    return can_use_flash_attention(params)


class _Gathered(torch.autograd.Function):
    """A rank's keys and values -> those of all ranks, in the order of the sequence."""

    @staticmethod
    def forward(ctx: Any, key: Tensor, value: Tensor, exchange: ContextExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        gathered = exchange.gather(torch.stack((key, value)))
        return joined(gathered[:, 0]), joined(gathered[:, 1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ranks = ctx.exchange.ranks
        key, value = ctx.exchange.add(torch.stack([cut(grad, ranks) for grad in grads], dim=1))
        return key, value, None


class _ToHeads(torch.autograd.Function):
    """[ranks, batch, heads, time, dim], heads for each rank -> [batch, heads, ranks * time, dim], in order."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, exchange: ContextExchange) -> Tensor:
        ctx.exchange = exchange
        return joined(exchange.turn(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.turn(cut(grads[0], ctx.exchange.ranks)), None


class _ToSequence(torch.autograd.Function):
    """The way back."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: ContextExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.turn(cut(whole, exchange.ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return joined(ctx.exchange.turn(grads[0])), None
