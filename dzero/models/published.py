"""Models as Hugging Face publishes them: names of parameters, and config.json.

    kind   their class                 a parameter of ours               of theirs
    llama  LlamaForCausalLM            layers.0.attention.query.weight   model.layers.0.self_attn.q_proj.weight
    hf     whichever the model is of   model.<name>                      <name>

The values are the same, in the same layout: rotary turns the same dims in both.
"""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from dzero.models.hf import HFDecoder
from dzero.models.llama import Llama
from dzero.models.moe import MoE
from dzero.models.shapes import LlamaShape

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
KINDS = ("llama", "hf")
WRAPPED = "model."
"""`HFDecoder` holds a model of transformers under this name."""


def describe(model: nn.Module) -> dict[str, Any] | None:
    """What an export needs to know of a model besides its parameters, as JSON: `kind`, and the text of `config.json`.

    model: as built or sharded. None for one that Hugging Face has no layout for.
    """
    if isinstance(model, MoE):
        return None
    if isinstance(model, Llama):
        return {"kind": "llama", "config": json.dumps(llama_config(model.shape))}
    if isinstance(model, HFDecoder):
        inner = model.model
        # fully_shard gives a module a class of its own, below the one that transformers can find again.
        published = next(each for each in type(inner).__mro__ if each.__module__.startswith("transformers."))
        config = json.loads(inner.config.to_json_string())
        return {"kind": "hf", "config": json.dumps(config | {"architectures": [published.__name__]})}
    return None


def published_name(kind: str, name: str) -> str:
    """Of a parameter or buffer of ours. Raises ValueError where the kind has none of that name."""
    if kind == "llama":
        first, *rest = name.split(".")
        if first not in OUTER:
            raise ValueError(f"{name} is no parameter of a llama")
        return ".".join([OUTER[first], *(INNER.get(word, word) for word in rest)])
    if not name.startswith(WRAPPED):
        raise ValueError(f"{name} is no parameter of a model of transformers")
    return name.removeprefix(WRAPPED)


def llama_config(shape: LlamaShape) -> dict[str, Any]:
    """config.json of LlamaForCausalLM; without tokens of a tokenizer's own, and without a longest sequence if none."""
    longest = {} if shape.max_tokens is None else {"max_position_embeddings": shape.max_tokens}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        **longest,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
