"""Small decoders of dzero and of transformers: on meta, or with the values of a seed.

This is the one place where tests of models and of cuts of them make what `train.py` makes of the settings `model.*` and
`block.*`; everything else about them is asked through `import dzero`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dzero.models import build as models
from dzero.models.config import ModelConfig
from dzero.models.hf import HFDecoder
from dzero.models.meta_init import MetaInitializer
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "ffn_size": 48}
EXPERTS = {"kind": "moe", "ffn_size": 24, "experts": 4, "top_k": 2, "shared_experts": 1, "scores": "sigmoid"}
TRANSFORMERS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "head_dim": 8,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0}


def on_meta(vocab: int | None = 64, /, **settings: Any) -> nn.Module:
    """The model of settings `model.*` for data of `vocab` ids, without values: a small llama where nothing is given."""
    return models.build(config_of(settings), vocab)


def with_values(vocab: int | None = 64, /, *, seed: int = 0, **settings: Any) -> nn.Module:
    """The same with values: those of `seed`, or those of the folder that `weights` names."""
    model = on_meta(vocab, **settings)
    models.materialiser(config_of(settings), model, seed=seed, device="cpu")(model)
    return model


def filling(model: nn.Module, *, seed: int = 0, **settings: Any) -> MetaInitializer:
    """What gives a model its values, module by module: on the CPU, and those of a folder if settings name one."""
    if settings:
        return models.materialiser(config_of(settings), model, seed=seed, device="cpu")
    return MetaInitializer(model, seed=seed, device="cpu")


def config_of(settings: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**(settings if settings.get("kind") == "hf" else {**SIZES, **settings}))


def of_transformers(kind: str, *, on: str = "meta", **sizes: Any) -> HFDecoder:
    """A small model of transformers, as `model=hf` has it: on meta, or with the values of torch's generator."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**(GPT2 if kind == "gpt2" else TRANSFORMERS), **sizes})
    with torch.device(on):
        return HFDecoder(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32))


def in_blocks(model: nn.Module, *, device: str = "cpu", tokens: int | None = None, **settings: Any) -> nn.Module:
    """Wrap the blocks of a model in place, by the settings `block.*`; the model."""
    apply_blocks(model, BlockConfig(**settings), device, tokens)
    return model
