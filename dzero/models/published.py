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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from dzero.models.adapter_names import FILE as ADAPTER_CONFIG
from dzero.models.adapter_names import settings_from, settings_of, settings_text, why_base_changed
from dzero.models.adapters import adapted_part, base_of, has_adapters
from dzero.models.config import LlamaShape, MoEShape
from dzero.models.conversions import Conversion
from dzero.models.hf import CONFIG, GENERATION, HFDecoder, decoder_from
from dzero.models.hf_conversions import as_saved
from dzero.models.llama import Llama
from dzero.models.llama_names import INNER, OUTER
from dzero.models.loaded_names import Shape, as_loader_expects
from dzero.models.merged_weights import ALONE, adapted_model
from dzero.models.mixtral import settings_to_change, to_published
from dzero.models.moe import MoE
from dzero.models.tensor_views import Readable
from dzero.utils.hub_cache import read_bytes
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
        generation: Text of generation_config.json, if it has one.
    """

    kind: str
    config: str
    layout: tuple[Conversion, ...] = ()
    adapter: AdapterDescription | None = None
    generation: str | None = None


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Return the description of a model that an export needs.

    Args:
        model: The model as built, or sharded, or what `shard` returned; it may have an adapter of peft.

    Returns:
        JSON values of a `Description`. None if Hugging Face has no layout for the model, or it has several adapters.
    """
    model = getattr(model, "model", model) if not isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module):
        raise TypeError(f"describe of {type(model).__name__}: give a model, or what dzero.shard(model) returned")
    adapter = None
    if has_adapters(model):
        settings = adapted_part(model).peft_config
        if len(settings) != 1:
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
    generates = hasattr(inner, "can_generate") and inner.can_generate() and inner.generation_config is not None
    generation = inner.generation_config.to_json_string() if generates else None
    return Description(kind, config, tuple(as_saved(published, inner.config)), generation=generation)


@dataclass(frozen=True)
class Published:
    """Content of the folder that a model is published in.

    Attributes:
        tensors: Tensors by their names there.
        file: Name of the file of settings: config.json, or adapter_config.json of an adapter alone.
        settings: Text of that file.
        texts: Texts of other files, by name.
    """

    tensors: Mapping[str, Readable]
    file: str
    settings: str
    texts: Mapping[str, str] = field(default_factory=dict)


def published(
    described: Description,
    values: Mapping[str, Readable],
    *,
    trained: Collection[str],
    base: Mapping[str, Readable] | None = None,
) -> Published:
    """Return what the folder that a model is published in holds; every way to give a model out takes it from here.

    Of a model with an adapter, this is the adapter, or with `base` the model with the adapter merged in. Everything
    that was trained is in it, and its names are those that the loader expects (`loaded_names.as_loader_expects`).

    Args:
        described: The model.
        values: Its tensors, by name in the model; those of the adapter are enough for a folder of that.
        trained: Names of those that were trained.
        base: Tensors of the model without the adapter that `values` lacks, by published name; the adapter is merged
            into them. None: it is not merged.

    Raises:
        ValueError: If a name is none of the model's, two tensors have the same name, a trained tensor would be left
            out, or the loader would miss one.
    """
    texts = {} if described.generation is None else {GENERATION: described.generation}
    named: dict[str, Readable] = {}
    for own, value in values.items():
        name = published_name(described.kind, own)
        if name in named:
            raise ValueError(f"{value.where} and {named[name].where} are both {name}")
        named[name] = value
    if described.adapter is None:
        tensors, config = as_loader_expects(described.config, described.layout, named)
        found = Published(tensors, CONFIG, config, texts)
        repair = "save a checkpoint with dzero.Checkpointer instead"
    else:
        adapter = described.adapter
        if base and (reason := why_base_changed(settings_from(adapter.config))):
            raise ValueError(f"{reason}; weights that were read from the model's folder lack that change")
        adapted = adapted_model(described.config, adapter.name, adapter.config)
        placed = adapted.placed({adapted.renamed[name]: value for name, value in (base or {}).items()} | named)
        if base is None:
            embeddings = is_resized(adapter.config, described.config)
            found = Published(adapted.adapter_tensors(placed, embeddings=embeddings), ADAPTER_CONFIG, adapter.config)
            repair = (
                "merge the adapter into the model (merge=True), freeze it before training, or name its module in "
                "modules_to_save"
            )
        else:
            tensors, config = as_loader_expects(described.config, described.layout, adapted.merged_tensors(placed))
            found = Published(tensors, CONFIG, config, texts)
            repair = ALONE
    written = {name for tensor in found.tensors.values() for name in tensor.stored}
    if lost := sorted(own for own in trained if not written.issuperset(values[own].stored)):
        raise ValueError(f"{lost[0]} was trained, and {found.file} is of a folder that would leave it out: {repair}")
    return found


def why_unpublished(model: nn.Module, *, merge: bool) -> str:
    """Return why a model could not be published after training, or nothing; ask before any axis cuts it.

    Args:
        model: The model as built. That it has no published layout is told where one is asked for.
        merge: Whether its adapter would be merged.
    """
    try:
        if has_adapters(model):
            settings_of(adapted_part(model).peft_config)
        if (described := describe(model)) is None:
            return ""
        values: dict[str, Readable] = {}
        done: set[int] = set()
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) not in done:
                done.add(id(tensor))
                values[name] = Shape(name, tuple(tensor.shape))
        trained = [name for name, param in model.named_parameters() if param.requires_grad and name in values]
        published(msgspec.convert(described, Description), values, trained=trained, base={} if merge else None)
    except ValueError as error:
        return str(error)
    return ""


def refuse_lost_adapter(model: nn.Module) -> None:
    """Raise ValueError if the adapter of a model could be saved neither alone nor merged; before any axis cuts it.

    Of several adapters, one may be left at the end, so nothing is refused.
    """
    if not has_adapters(model) or len(adapted_part(model).peft_config) != 1 or (described := describe(model)) is None:
        return
    try:
        decoder_from(json.loads(described["config"]))
    except ValueError:
        return  # of a model that transformers does not build from its config alone, which is told on saving
    if (alone := why_unpublished(model, merge=False)) and (merged := why_unpublished(model, merge=True)):
        because = alone if alone == merged else f"alone, because {alone}; merged, because {merged}"
        raise ValueError(f"what is trained could not be saved: {because}")


def is_resized(adapter: str, config: str) -> bool:
    """Return whether a model has another vocabulary than the folder that its adapter names as its base.

    Args:
        adapter: Text of its adapter_config.json.
        config: Text of its config.json.
    """
    base = json.loads(adapter).get("base_model_name_or_path")
    file = Path(base) / CONFIG if isinstance(base, str) and base else None
    if file is None or not file.is_file():
        return False
    before, now = (_vocabulary(json.loads(text)) for text in (read_bytes(file), config))
    return before is not None and before != now


def _vocabulary(config: dict[str, Any]) -> Any:
    return config.get("vocab_size", (config.get("text_config") or {}).get("vocab_size"))


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
