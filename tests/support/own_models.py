"""The decoders of dzero itself, small, with values of their own that are the same at every call."""

from __future__ import annotations

from typing import Any

import decoders
from torch import nn


def llama(vocab_size: int = 61, **sizes: Any) -> nn.Module:
    return decoders.with_values(vocab_size, **{"kv_heads": 2, **sizes})


def mixture(vocab_size: int = 61) -> nn.Module:
    """A Mixtral of four experts, of which a token uses two."""
    return llama(vocab_size, kind="moe", experts=4, top_k=2, balance="none")
