"""The decoders of dzero itself, small, with values of their own that are the same at every call."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dzero.models.config import LlamaShape, MoEShape
from dzero.models.llama import Llama
from dzero.models.moe import MoE

SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48}


def llama(vocab_size: int = 61, **sizes: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Llama(LlamaShape(vocab_size=vocab_size, **SIZES | sizes))


def mixture(vocab_size: int = 61, **sizes: Any) -> nn.Module:
    """A Mixtral of four experts, of which a token uses two."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MoE(MoEShape(vocab_size=vocab_size, experts=4, top_k=2, balance="none", **SIZES | sizes))
