"""Trial of a small copy of a model of transformers: does it compute the same from cut sequences as from whole ones?

Under context parallelism only attention sees other ranks' tokens. A model that carries anything else from token to
token, counts positions by its input, or asks its attention for something that a kernel is not told, would train on
wrong numbers. So its class is built from its configuration with few and narrow layers, and run twice in this process,
in fp32:

    whole    [1, time]         attention of transformers
    cut      [ranks, part]     one row for each rank, with that rank's positions; attention joins the rows

All else sees the rows of a batch, which are as separate as ranks are. Windows are short, so that a short sequence has
what a long one has.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dzero.errors import converting
from dzero.parallel.context.scores import PLAIN, Scores, attention_of
from dzero.parallel.context.zigzag import Zigzag, cut, joined

RANKS, TIME, WINDOW, HEADS, HEAD_DIM = 2, 16, 3, 8, 8
DEVIATION = 0.2
"""Of the copy's weights, large enough that attention is far from uniform."""
ALLOWED = 1e-4
"""Largest difference of a token's logits, relative to their length."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": HEADS * HEAD_DIM,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
}
"""Sizes of the copy, of those that the configuration has; they are never larger than there."""


class JoinedRows:
    """Attention over sequences whose parts are the rows of a batch [ranks, heads, part, head_dim] of one process."""

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, scores: Scores = PLAIN
    ) -> Tensor:
        """Compute attention over the joined rows, and return it in rows."""
        ranks = len(query)
        query, key, value = (joined(each.unsqueeze(1)) for each in (query, key, value))
        return cut(attention_of(query, key, value, mask, scores), ranks).squeeze(1)

    def queries(self, time: int, device: torch.device) -> Tensor:
        """Return all places of the sequence, int64 [time]."""
        return torch.arange(time, device=device)

    def mask_of(self, positions: Tensor) -> Tensor:
        """Raise NotImplementedError: a trial has one document."""
        raise NotImplementedError(f"positions {[*positions.shape]} in a trial")


def differs_when_cut(model: Any, what: str, keywords: Mapping[str, Any], choose: Callable[[Any], None]) -> float:
    """Return by how much the logits of a token of a small copy differ at most, relative to their length.

    Args:
        model: A causal LM of transformers; only its configuration is used.
        what: Start of messages: the setting and the model.
        keywords: Keywords that hand the attention of `JoinedRows` down to the kernel.
        choose: Function that makes a model attend by that kernel.

    Raises:
        ValueError: If the configuration makes no small model, or it does not run.
    """
    # For sizes that make no model, transformers may raise any kind of error.
    with converting(f"{what} cannot be tried in small sizes", Exception, repair="take mesh.cp=1"), torch.no_grad():
        small = _small_copy(model)
        tokens = torch.arange(TIME).unsqueeze(0) % small.config.get_text_config().vocab_size
        splits = [Zigzag(rank, RANKS) for rank in range(RANKS)]
        want = small(input_ids=tokens, use_cache=False).logits[0]
        choose(small)
        rows = torch.cat([split.part(tokens) for split in splits])
        positions = torch.stack([split.positions(TIME // RANKS) for split in splits])
        got = joined(small(input_ids=rows, position_ids=positions, use_cache=False, **keywords).logits)
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def _small_copy(model: Any) -> Any:
    """Return a small model of the same class and configuration with random values, fp32 on the CPU."""
    config = copy.deepcopy(model.config)
    for part in {id(each): each for each in (config, config.get_text_config())}.values():
        for key, value in [*_small_sizes(part)]:
            setattr(part, key, value)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        causal = sys.modules["transformers"].AutoModelForCausalLM
        small = causal.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        for param in small.parameters():
            nn.init.normal_(param, mean=float(param.mean()), std=DEVIATION)
    return small


def _small_sizes(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the settings that make a configuration small, of those that it has."""
    layers, heads = config.num_hidden_layers, config.num_attention_heads
    kinds = getattr(config, "layer_types", None)
    first = [*dict.fromkeys(kinds)] if kinds else []
    few = max(2, len(first))
    for key, value in vars(config).items():
        if isinstance(value, (list, tuple)) and len(value) == layers:
            yield key, (first * few)[:few] if key == "layer_types" else value[:few]
        elif key in SMALL and type(value) is int:
            yield key, min(value, SMALL[key])
    yield "num_hidden_layers", few
    yield "num_attention_heads", HEADS
    kv_heads = getattr(config, "num_key_value_heads", None)
    if kv_heads is not None:
        yield "num_key_value_heads", HEADS if kv_heads == heads else min(kv_heads, HEADS // 2)
    if getattr(config, "head_dim", None) is not None and not hasattr(config, "qk_rope_head_dim"):
        yield "head_dim", min(config.head_dim, HEAD_DIM)
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        if getattr(config, key, None) is not None:
            yield key, 0
