"""Causal attention over sequences that are split over ranks (parallel/context/zigzag.py), forward and backward.

    kind        sent in forward, per layer           sent in backward     a rank then computes
    all_gather  keys and values: all-gathered        reduce-scattered     all heads of its own queries
    ulysses     queries, keys, values: from a part   the same, reversed   its heads of all queries
                of every head to all of some heads;
                results: back
    ring        keys and values: of one rank after   the same, and        all heads of its own queries
                another (context/ring.py)            gradients

Ulysses (Jacobs et al. 2023) sends less with many ranks, but they must divide the heads. all_gather sends only keys and
values, of which grouped queries have few, and takes any number of ranks. ring sends more than that, but overlaps it
with computation, and never holds more than the keys of two ranks.

Note: prefixes without masks of time x time. Chunk c of all_gather attends to the keys up to its own end, aligned at the
right. Flash attention on CUDA computes this; the interface that torch documents for it, `nn.attention.bias`, fails
inside selective checkpoints. Other kernels support only a causal square or masks, so queries are processed in tiles of
`TILE_TOKENS`. All tiles, layers and microbatches share one mask of tile x time; a shorter prefix takes its right part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention

from dzero.comm.context_exchange import ContextExchange
from dzero.models.llama import within_documents
from dzero.parallel.context.ring import Ring
from dzero.parallel.context.scores import PLAIN, Scores, attention_of
from dzero.parallel.context.zigzag import chunks_of, cut, joined
from dzero.parallel.divisibility import check_heads
from dzero.utils.torch_internals import FLASH, flash_attention

TILE_TOKENS = 256


class ContextAttention(Protocol):
    """Attention over this rank's query [batch, heads, time, dim], and key and value [batch, kv_heads, time, dim].

    The result has the shape of query.
    """

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Compute attention; all ranks of the axis call it, in the same order.

        `mask` is what `mask_of` returned, or bool [batch or 1, 1, queries, time] for the queries of `queries`.
        """

    def queries(self, time: int, device: torch.device) -> Tensor:
        """Return the places in a sequence of `time` tokens of the queries that this rank computes for, int64."""

    def mask_of(self, positions: Tensor) -> Tensor:
        """Return the mask for sequences that hold several documents, from the positions of all of their tokens.

        Positions are int64 [batch, time]; a document begins at each 0.
        """


class AllGather:
    """Attention of every rank's queries to the keys and values of all ranks."""

    def __init__(self, exchange: ContextExchange) -> None:
        self._exchange, self._masks = exchange, Masks()

    def mask_of(self, positions: Tensor) -> Tensor:
        """Return which keys of the sequence each query of this rank attends to, bool [batch, 1, part, time]."""
        return within_documents(positions)[:, :, self.queries(positions.shape[1], positions.device)]

    def queries(self, time: int, device: torch.device) -> Tensor:
        """Return the places of this rank's tokens, int64 [part]."""
        chunks = torch.arange(time, device=device).chunk(2 * self._exchange.ranks)
        return torch.cat([chunks[chunk] for chunk in chunks_of(self._exchange.rank, self._exchange.ranks)])

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Implement `ContextAttention`."""
        keys, values = _Gathered.apply(key, value, self._exchange)  # type: ignore[no-untyped-call]
        if mask is not None:
            return attention_of(query, keys, values, mask, scores)
        ours = chunks_of(self._exchange.rank, self._exchange.ranks)
        mixed: list[Tensor] = []
        self._masks.tokens = keys.shape[2]
        for chunk, queries in zip(ours, query.chunk(2, dim=2), strict=True):
            end = (chunk + 1) * queries.shape[2]
            mixed += over_prefix(queries, keys[:, :, :end], values[:, :, :end], self._masks, scores)
        return torch.cat(mixed, dim=2)


class Ulysses:
    """Attention of all queries for some heads on every rank."""

    def __init__(self, exchange: ContextExchange) -> None:
        self._exchange = exchange

    def mask_of(self, positions: Tensor) -> Tensor:
        """Return which keys each query attends to, bool [batch, 1, time, time]."""
        return within_documents(positions)

    def queries(self, time: int, device: torch.device) -> Tensor:
        """Return all places of the sequence, int64 [time]."""
        return torch.arange(time, device=device)

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Implement `ContextAttention`; raise ValueError if the ranks do not divide the heads."""
        ranks = self._exchange.ranks
        check_heads(query.shape[1], key.shape[1], ranks)
        ours = [each.view(len(each), ranks, -1, *each.shape[2:]) for each in (query, key, value)]
        sizes = [each.shape[2] for each in ours]
        whole = _ToHeads.apply(torch.cat(ours, dim=2).transpose(0, 1), self._exchange)  # type: ignore[no-untyped-call]
        query, key, value = whole.split(sizes, dim=1)
        if scores.sinks is not None:
            scores = replace(scores, sinks=scores.sinks.chunk(ranks)[self._exchange.rank])
        mixed = attention_of(query, key, value, mask, scores)
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
    """The mask that all tiles share; it is made anew for other `tokens` of a whole sequence, another dtype or device.

    It always covers `tokens`, although less suffices for a shorter prefix: recomputation in backward must make the same
    tensors as forward.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._mask = torch.empty(0, 0)

    def of(self, tile: Tensor, keys: int) -> Tensor:
        """Return [tile's tokens, keys]: 0 where a query attends to a key, the last query to all of them; else -inf."""
        mask = self._mask
        if mask.shape[1] != self.tokens or mask.dtype != tile.dtype or mask.device != tile.device:
            with torch.inference_mode(False):  # training may use a mask that an evaluation made
                unseen = torch.full((TILE_TOKENS, self.tokens), -torch.inf, dtype=tile.dtype, device=tile.device)
                mask = self._mask = unseen.triu(self.tokens - TILE_TOKENS + 1)
        return mask[-tile.shape[2] :, self.tokens - keys :]


def over_prefix(query: Tensor, keys: Tensor, values: Tensor, masks: Masks, scores: Scores = PLAIN) -> Iterator[Tensor]:
    """Yield the attention of queries to the prefix of a sequence that ends with them, tile by tile.

    The query is [batch, heads, time, dim], and keys and values are [batch, kv_heads, >= time, dim].
    """
    time, length, grouped = query.shape[2], keys.shape[2], _grouped(query, keys)
    if time == length:
        yield attention_of(query, keys, values, None, scores)
        return
    if _has_flash(query, keys, values):
        yield flash_attention(query, keys, values, scale=scores.scale, dropout=scores.dropout)
        return
    for start in range(0, time, TILE_TOKENS):
        tile = query[:, :, start : start + TILE_TOKENS]
        end = length - time + start + tile.shape[2]
        seen = keys[:, :, :end], values[:, :, :end]
        yield F.scaled_dot_product_attention(
            tile, *seen, masks.of(tile, end), scores.dropout, scale=scores.scale, enable_gqa=grouped
        )


def _has_flash(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Return whether flash attention on CUDA takes the inputs without padding head_dim.

    torch has no query for a causal prefix, so the query is made without causality.
    """
    if not query.is_cuda or query.shape[-1] % 8 or not FLASH.is_there:
        return False
    params = SDPAParams(query, keys, values, None, 0.0, False, _grouped(query, keys))
    return can_use_flash_attention(params)


class _Gathered(torch.autograd.Function):
    """All-gather of keys and values, in the order of the sequence; backward reduce-scatters gradients."""

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
    """All-to-all from [ranks, batch, heads, time, dim], heads by rank, to [batch, heads, ranks * time, dim]."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, exchange: ContextExchange) -> Tensor:
        ctx.exchange = exchange
        return joined(exchange.turn(parts))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.turn(cut(grads[0], ctx.exchange.ranks)), None


class _ToSequence(torch.autograd.Function):
    """Inverse of `_ToHeads`."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, exchange: ContextExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.turn(cut(whole, exchange.ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return joined(ctx.exchange.turn(grads[0])), None
