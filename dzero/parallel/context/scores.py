"""Attention to keys that a mask allows, with what models ask for beside it: a scale, a cap, sinks, dropout.

    query [batch, heads, queries, dim], keys and values [batch, kv_heads, keys, dim], mask bool or None (causal)
    score = cap * tanh(scale * query . key / cap)          (without a cap: scale * query . key)
    weight = exp(score) / (exp(sink of the head) + sum of exp(score) over the keys that are seen)

Without cap and sinks this is torch's fused attention. With them it is written out, as in transformers: the scores of
all queries exist at once, and softmax is computed in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Scores:
    """How scores become weights.

    Attributes:
        scale: Factor of query . key; None: 1 / sqrt(head_dim).
        cap: Limit of the scores' magnitude; None: no limit.
        sinks: A score of each head [heads] that takes weight and gives no value; None: no sinks.
        dropout: Probability with which a weight becomes 0.
    """

    scale: float | None = None
    cap: float | None = None
    sinks: Tensor | None = None
    dropout: float = 0.0

    @property
    def is_fused(self) -> bool:
        """Whether torch's fused attention computes them."""
        return self.cap is None and self.sinks is None


PLAIN = Scores()
"""Scores of a model that asks for nothing."""


def attention_of(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scores: Scores = PLAIN) -> Tensor:
    """Return the attention of queries to the keys for which `mask` [batch or 1, 1, queries, keys] is True.

    None stands for a causal square. Cap and sinks need a mask.
    """
    groups = query.shape[1] // keys.shape[1]
    if not scores.is_fused:
        assert mask is not None
        keys, values = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1)
        return _written_out(query, keys, values, mask, scores)
    if mask is not None and query.is_cuda and groups > 1:  # CUDA's kernels take masks, or grouped heads, not both
        keys, values, groups = keys.repeat_interleave(groups, dim=1), values.repeat_interleave(groups, dim=1), 1
    return F.scaled_dot_product_attention(
        query,
        keys,
        values,
        mask,
        dropout_p=scores.dropout,
        is_causal=mask is None,
        scale=scores.scale,
        enable_gqa=groups > 1,
    )


def _written_out(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    scale = query.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    found = (query @ keys.transpose(2, 3)) * scale
    if scores.cap is not None:
        found = (found / scores.cap).tanh() * scores.cap
    found = found.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.to(found.dtype).view(1, -1, 1, 1).expand(len(found), -1, found.shape[2], 1)
        found = torch.cat([found, sinks], dim=-1)
    weights = found.softmax(-1, dtype=torch.float32)[..., : keys.shape[2]].to(query.dtype)
    return F.dropout(weights, scores.dropout) @ values


def seen_keys(queries: Tensor, time: int, positions: Tensor | None = None, window: int | None = None) -> Tensor:
    """Return which keys of a sequence each query attends to, bool [batch or 1, 1, queries, time].

    Args:
        queries: Places of the queries in the sequence, int64 [queries].
        time: Length of the sequence.
        positions: Positions in their documents of all tokens, int64 [batch, time], where sequences hold several
            documents, which begin at each 0; a query sees only its own document.
        window: Number of keys that a query sees at most, itself included; None: all before it.
    """
    keys, rows = torch.arange(time, device=queries.device), queries.unsqueeze(1)
    seen = keys <= rows
    if window is not None:
        seen = seen & (keys > rows - window)
    if positions is None:
        return seen[None, None]
    document = (positions == 0).cumsum(1)
    return (seen & (document[:, queries].unsqueeze(2) == document.unsqueeze(1))).unsqueeze(1)
