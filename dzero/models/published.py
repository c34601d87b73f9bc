"""Names of parameters, and config.json, of models as Hugging Face publishes them.

    kind   published class             parameter name in dzero          published parameter name
    llama  LlamaForCausalLM            layers.0.attention.query.weight  model.layers.0.self_attn.q_proj.weight
           MixtralForCausalLM          the same; experts are converted after that (mixtral.py)
    hf     class of the model          model.<name>                     <name>
    bare   class of the model          <name>                           <name>

Values and layouts are the same: rotary positions rotate the same pairs of dims in both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from torch import nn

from dzero.models.adapters import base_of, has_adapters
from dzero.models.config import LlamaShape, MoEShape
from dzero.models.conversions import Conversion
from dzero.models.hf import HFDecoder
from dzero.models.hf_conversions import as_saved
from dzero.models.llama import Llama
from dzero.models.mixtral import settings_to_change, to_published
from dzero.models.moe import MoE

OUTER = {"embedding": "model.embed_tokens", "layers": "model.layers", "norm": "model.norm", "head": "lm_head"}
INNER = {
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "ffn": "mlp",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}
SETTINGS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_size",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "rms_norm_eps": "norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tied",
}
"""Names of settings in `LlamaShape`, by their names in config.json."""
MIXTURE_SETTINGS = {**SETTINGS, "num_local_experts": "experts", "num_experts_per_tok": "top_k"}
"""The same for `MoEShape`."""
FIXED: dict[str, Any] = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
"""Settings that are constant in `Llama`, by their names in config.json."""
MIXTURE_FIXED: dict[str, Any] = {"hidden_act": "silu", "sliding_window": None}
"""The same for `MoE`."""
KINDS = ("llama", "hf", "bare")
MODELS = "transformers.models."
"""Package of the models of transformers; its base classes for others' are elsewhere."""
WRAPPED = "model."
"""Prefix of parameter names in `HFDecoder`, which wraps a transformers model."""


def describe(model: nn.Module, *, merged: bool = False) -> dict[str, Any] | None:
    """Return the description of a model that an export needs.

    Args:
        model: The model as built, or sharded.
        merged: Describe a model with adapters of peft as it is when they are merged into its weights.

    Returns:
        JSON values: the `kind`, the text of `config.json`, and as `layout` the conversions (conversions.py) of what is
        published in another layout, if anything is. None if Hugging Face has no layout for the model, such as for one
        with adapters.
    """
    if has_adapters(model) and not merged:
        return None
    if isinstance(model, MoE):
        if settings_to_change(model.shape):
            return None
        return _described("llama", json.dumps(mixtral_config(model.shape)), to_published(model.shape))
    if isinstance(model, Llama):
        return _described("llama", json.dumps(llama_config(model.shape)))
    kind = "hf" if isinstance(model, HFDecoder) else "bare"
    inner = base_of(model)
    # fully_shard gives the module a new subclass; transformers can only load the class that it derives from.
    published = next((each for each in type(inner).__mro__ if each.__module__.startswith(MODELS)), None)
    if published is None or not hasattr(inner, "config"):
        return None
    config = json.dumps(json.loads(inner.config.to_json_string()) | {"architectures": [published.__name__]})
    return _described(kind, config, as_saved(published, inner.config))


def _described(kind: str, config: str, layout: Sequence[Conversion] = ()) -> dict[str, Any]:
    """Return the JSON values of `describe`."""
    return {"kind": kind, "config": config} | ({"layout": json.loads(msgspec.json.encode(layout))} if layout else {})


def published_name(kind: str, name: str) -> str:
    """Return the published name of a parameter or buffer; raise ValueError if models of this kind have no such name."""
    if kind == "llama":
        first, *rest = name.split(".")
        if first not in OUTER:
            raise ValueError(f"{name} is no parameter of a llama")
        return ".".join([OUTER[first], *(INNER.get(word, word) for word in rest)])
    if kind == "bare":
        return name
    if not name.startswith(WRAPPED):
        raise ValueError(f"{name} is no parameter of a model of transformers")
    return name.removeprefix(WRAPPED)


def llama_config(shape: LlamaShape) -> dict[str, Any]:
    """Return config.json of LlamaForCausalLM, without special tokens; without a maximum length if `shape` has none."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **{key: getattr(shape, name) for key, name in SETTINGS.items()},
        **FIXED,
        **_common_config(shape),
    }


def mixtral_config(shape: MoEShape) -> dict[str, Any]:
    """Return config.json of MixtralForCausalLM, in the same way; the rate of a balancing loss is told too."""
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **{key: getattr(shape, name) for key, name in MIXTURE_SETTINGS.items()},
        **MIXTURE_FIXED,
        "router_aux_loss_coef": shape.rate,
        **_common_config(shape),
    }


def _common_config(shape: LlamaShape) -> dict[str, Any]:
    longest = {} if shape.max_tokens is None else {"max_position_embeddings": shape.max_tokens}
    return {
        **longest,
        "head_dim": shape.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "bos_token_id": None,
        "eos_token_id": None,
    }
