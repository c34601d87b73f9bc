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
from collections.abc import Collection, Mapping
from typing import Any

import msgspec
from torch import nn

from dzero.models.adapter_names import INSIDE, saved_name, settings_of, settings_text, why_unsaved
from dzero.models.adapters import adapted_part, base_of, has_adapters
from dzero.models.config import LlamaShape, MoEShape
from dzero.models.conversions import Conversion, convert_all
from dzero.models.hf import HFDecoder, decoder_from
from dzero.models.hf_conversions import as_saved
from dzero.models.llama import Llama
from dzero.models.llama_names import INNER, OUTER
from dzero.models.merged_weights import adapted_decoder, merged_weights
from dzero.models.mixtral import settings_to_change, to_published
from dzero.models.moe import MoE
from dzero.models.tensor_views import Readable
from dzero.utils.torch_internals import uncompiled, without_wrappers

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


class AdapterDescription(msgspec.Struct):
    """Name of an adapter in a model, and the text of its adapter_config.json."""

    name: str
    config: str


class Description(msgspec.Struct, omit_defaults=True):
    """Description of a model, from which its tensors are published.

    Attributes:
        kind: One of `KINDS`.
        config: Text of config.json.
        layout: Conversions (conversions.py) of what is published in another layout.
        adapter: Its adapter, if it has one.
    """

    kind: str
    config: str
    layout: tuple[Conversion, ...] = ()
    adapter: AdapterDescription | None = None


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Return the description of a model that an export needs.

    Args:
        model: The model as built, or sharded; it may have an adapter of peft.

    Returns:
        JSON values of a `Description`. None if Hugging Face has no layout for the model, or peft none for its adapters.
    """
    adapter = None
    if has_adapters(model):
        settings = adapted_part(model).peft_config
        if why_unsaved(settings):
            return None
        name, saved = settings_of(settings)
        adapter = AdapterDescription(name, settings_text(saved))
    if (found := _base_description(model)) is None:
        return None
    found.adapter = adapter
    described: dict[str, Any] = json.loads(msgspec.json.encode(found))
    return described


def _base_description(model: nn.Module) -> Description | None:
    """Return the description of a model without its adapters."""
    model = uncompiled(model)
    if isinstance(model, MoE):
        if settings_to_change(model.shape):
            return None
        return Description("llama", json.dumps(mixtral_config(model.shape)), tuple(to_published(model.shape)))
    if isinstance(model, Llama):
        return Description("llama", json.dumps(llama_config(model.shape)))
    kind = "hf" if isinstance(model, HFDecoder) else "bare"
    inner = base_of(model)
    # fully_shard gives the module a new subclass; transformers can only load the class that it derives from.
    published = next((each for each in type(inner).__mro__ if each.__module__.startswith(MODELS)), None)
    if published is None or not hasattr(inner, "config"):
        return None
    config = json.dumps(json.loads(inner.config.to_json_string()) | {"architectures": [published.__name__]})
    return Description(kind, config, tuple(as_saved(published, inner.config)))


def published_tensors(
    described: Description,
    values: Mapping[str, Readable],
    *,
    trained: Collection[str],
    base: Mapping[str, Readable] | None = None,
) -> dict[str, Readable]:
    """Return the tensors of the folder that a model is published in, by their names there.

    Of a model with an adapter, these are the tensors of the adapter, or with `base` those of the model with the adapter
    merged in.

    Args:
        described: The model.
        values: Its tensors, by name in the model; those of the adapter are enough for a folder of that.
        trained: Names of those that were trained.
        base: Tensors of the model without the adapter that `values` lacks, by published name; the adapter is merged
            into them. None: it is not merged.

    Raises:
        ValueError: If a name is none of the model's, two tensors have the same name, or a trained tensor would be left
            out of the folder.
    """
    named: dict[str, Readable] = {}
    for own, value in values.items():
        name = published_name(described.kind, own).removeprefix(INSIDE)
        if name in named:
            raise ValueError(f"{value.where} and {named[name].where} are both {name}")
        named[name] = value
    if described.adapter is None:
        return convert_all(described.layout, named)
    if base is not None:
        decoder = decoder_from(json.loads(described.config))
        adapted = adapted_decoder(decoder, described.adapter.name, described.adapter.config)
        below = {adapted.renamed[name]: value for name, value in base.items()}
        return convert_all(described.layout, merged_weights(adapted, below | named))
    saved = {name: saved_name(name, described.adapter.name) for name in named}
    published = {own: published_name(described.kind, own).removeprefix(INSIDE) for own in trained}
    if lost := sorted(own for own, name in published.items() if saved.get(name) is None):
        raise ValueError(
            f"{lost[0]} was trained and is no part of the adapter, so the folder of the adapter would leave it out: "
            "merge the adapter into the model"
        )
    return {f"{INSIDE}{name}": named[own] for own, name in saved.items() if name is not None}


def published_name(kind: str, name: str) -> str:
    """Return the published name of a parameter or buffer; raise ValueError if models of this kind have no such name."""
    name = without_wrappers(name)
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


def fixed_config(shape: LlamaShape) -> dict[str, Any]:
    """Return the values of config.json that make a llama or mixture this one; any of them differs in another model."""
    settings = MIXTURE_SETTINGS if isinstance(shape, MoEShape) else SETTINGS
    fixed = MIXTURE_FIXED if isinstance(shape, MoEShape) else FIXED
    return {**{key: getattr(shape, name) for key, name in settings.items()}, **fixed}


def _common_config(shape: LlamaShape) -> dict[str, Any]:
    longest = {} if shape.max_tokens is None else {"max_position_embeddings": shape.max_tokens}
    return {
        **longest,
        "head_dim": shape.head_dim,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "bos_token_id": None,
        "eos_token_id": None,
    }
