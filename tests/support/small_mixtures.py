"""Small mixtures of experts of transformers, with random values."""

from __future__ import annotations

from typing import Any

import decoders
import pytest
import torch
from torch import Tensor

VOCAB = 61
SIZES = {
    **{key: value for key, value in decoders.TRANSFORMERS.items() if key != "head_dim"},
    "vocab_size": VOCAB,
    "num_experts_per_tok": 2,
    "eos_token_id": None,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "olmoe": {"num_experts": 4},
    "deepseek_v3": {  # its first layer is dense
        **LATENT,
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
    },
}


def mixture(kind: str, **changes: Any) -> Any:
    """A model of transformers with its own random values, the same at every call."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **MIXTURES[kind], **changes})
    torch.manual_seed(5)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def tokens() -> Tensor:
    return torch.randint(VOCAB, (2, 10), generator=torch.Generator().manual_seed(3))
