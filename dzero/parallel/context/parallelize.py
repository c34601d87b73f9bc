"""Context parallelism: every sequence is split over the ranks of cp, and attention covers the whole sequence.

    needs whole sequences        gets instead
    the model's tokens           this rank's part: `ContextParallel.part` (context/zigzag.py), also of targets
    rotary positions             those of the tokens that the rank has
    attention                    the keys of all ranks, or some heads of all ranks (context/attention.py)

Everything else processes one token at a time. The ranks are data-parallel, and their gradients are averaged: a loss is
the sum over a rank's own tokens, divided by the mean number of tokens that count on a rank.

A model of transformers is given another attention kernel (context/hf.py). Any other model is plain torch: one module
has `features(tokens, positions)`, others `attend(query, key, value)` on tensors [batch, heads, time, head_dim], and
both are replaced in place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dzero.comm.context_exchange import ContextExchange
from dzero.comm.ledger import Entry, Ledger, Traffic, dtype_key
from dzero.comm.reduction import ExactReduction, NativeReduction
from dzero.mesh import CONTEXT
from dzero.parallel.context.attention import ATTENTIONS, ContextAttention
from dzero.parallel.context.hf import SplitModel, transformers_model
from dzero.parallel.context.ring import hops
from dzero.parallel.context.zigzag import Zigzag
from dzero.parallel.forward_wrapping import Forward, wrap_method


class ContextParallel:
    """Context parallelism of a model, which is changed in place, and of its tokens.

    Attributes:
        split_model: The model of transformers inside of the model; None if there is none.

    Args:
        model: Model, sharded or about to be.
        group: Ranks that share every sequence (`mesh.context_group`).
        ledger: Counts what is sent (`Sharded.ledger`).
        attention: `all_gather`, `ulysses` or `ring`.
        exact: Use pairwise exchanges instead of the backend's collectives (`Layout.exact`).

    Raises:
        ValueError: If the attention is unknown, or the model does not have the methods to replace.
    """

    def __init__(
        self, model: nn.Module, group: dist.ProcessGroup, ledger: Ledger, *, attention: str, exact: bool
    ) -> None:
        if attention not in ATTENTIONS:
            raise ValueError(f"mesh.cp_attention={attention!r}: choose one of {[*ATTENTIONS]}")
        self._zigzag = Zigzag(group.rank(), group.size())
        exchange = ContextExchange((ExactReduction if exact else NativeReduction)(group), group.rank(), CONTEXT, ledger)
        attends = ATTENTIONS[attention](exchange)
        published = transformers_model(model)
        self.split_model: SplitModel | None = None
        if published is not None:
            self.split_model = SplitModel(published, self._zigzag, attends, attention)
            return
        for method, wrap, key, needs in (
            ("attend", _attending, "context_attention", _eager(attends)),
            ("features", _positioned, "context_part", (self._zigzag, attends.mask_of)),
        ):
            owners = [module for module in model.modules() if callable(getattr(module, method, None))]
            if not owners:
                raise ValueError(
                    f"mesh.cp={group.size()}: {type(model).__name__} has no module with {method}(), which is replaced "
                    "where sequences are cut; take mesh.cp=1, or a model with the methods of dzero.models.llama"
                )
            for module in owners:
                setattr(module, key, needs)
            wrap_method(owners, method, wrap)

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's part of [batch, time]; raise ValueError if 2 * ranks does not divide time."""
        return self._zigzag.part(whole)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions in their sequences of this rank's `tokens` tokens of each: int64 [tokens]."""
        return self._zigzag.positions(tokens)


def _attending(_: Forward) -> Forward:
    def attend(self: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map query [batch, heads, time, head_dim] of this rank's tokens to the same shape."""
        attention: ContextAttention = self.context_attention
        return attention(query, key, value) if mask is None else attention(query, key, value, mask)

    return attend


def _positioned(features: Forward) -> Forward:
    def of_part(self: Any, tokens: Tensor, positions: Tensor | None = None) -> Any:
        """Map tokens [batch, part] of this rank to [batch, part, hidden].

        Positions of sequences that hold several documents are those of all tokens, [batch, time].
        """
        zigzag, mask_of = self.context_part
        if positions is not None and positions.ndim == 2:
            return features(self, tokens, zigzag.part(positions), mask_of(positions))
        return features(self, tokens, zigzag.positions(tokens.shape[1]) if positions is None else positions)

    return of_part


@dataclass(frozen=True, kw_only=True)
class AttentionSizes:
    """Sizes of one attention call on one rank; `tokens` are those of all its sequences together."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype


def expected_context(
    attention: str, sizes: AttentionSizes, *, ranks: int, calls: int, recomputed: bool
) -> dict[Entry, Traffic]:
    """Return the calls and bytes sent per rank over `ranks` of cp, by ledger entry (phase context).

    With e elements of this rank's queries and as many of the result, k of its keys and as many of its values:

            all_gather   forward    all_gather        (ranks - 1) * 2 k
                         backward   reduce_scatter    (ranks - 1) * 2 k
            ulysses      either     all_to_all        (ranks - 1) * (e + 2 k) / ranks
                                    all_to_all        (ranks - 1) * e / ranks
            ring         forward    permute           2 k, ranks - 1 times
                         backward   permute           2 k, ranks - 1 times, and in fp32 ranks times

    There are layers * microbatches `calls`; `recomputed` adds a second forward in backward (activation checkpointing).
    """
    totals: defaultdict[Entry, Traffic] = defaultdict(Traffic)
    for kind, sent_elems, forward, dtype in _moves(attention, sizes, ranks):
        times = calls * (2 if recomputed and forward else 1)
        totals[Entry("context", kind, CONTEXT, dtype_key(dtype))] += Traffic(times, times * sent_elems * dtype.itemsize)
    return dict(totals)


def _moves(attention: str, sizes: AttentionSizes, ranks: int) -> Iterator[tuple[str, int, bool, torch.dtype]]:
    """Yield kind, elements sent, whether in forward, and dtype of each collective of one call and its backward."""
    queries, keys = (sizes.tokens * heads * sizes.head_dim for heads in (sizes.heads, sizes.kv_heads))
    if attention == "all_gather":
        yield "all_gather", (ranks - 1) * 2 * keys, True, sizes.dtype
        yield "reduce_scatter", (ranks - 1) * 2 * keys, False, sizes.dtype
        return
    for forward in (True, False):
        if attention == "ring":
            for dtype, times in hops(sizes.dtype, ranks)[not forward]:
                yield from [("permute", 2 * keys, forward, dtype)] * times
            continue
        yield "all_to_all", (ranks - 1) * ((queries + 2 * keys) // ranks), forward, sizes.dtype
        yield "all_to_all", (ranks - 1) * (queries // ranks), forward, sizes.dtype


def _eager(attend: ContextAttention) -> ContextAttention:
    """Exclude attention that communicates from torch.compile; only a split model imports the compiler for it."""
    disabled: ContextAttention = torch.compiler.disable(attend.__call__)  # type: ignore[no-untyped-call]
    return disabled
