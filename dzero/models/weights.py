"""Mapping of the tensors in a published folder to the parameters of a model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dzero.models.config import LlamaShape, MoEShape
from dzero.models.conversions import convert_all
from dzero.models.hf import HFDecoder
from dzero.models.hf_conversions import as_loaded
from dzero.models.llama import Llama
from dzero.models.mixtral import from_published, settings_to_change
from dzero.models.moe import MoE
from dzero.models.published import (
    FIXED,
    MIXTURE_FIXED,
    MIXTURE_SETTINGS,
    SETTINGS,
    llama_config,
    mixtral_config,
    published_name,
)
from dzero.models.safetensors_reader import stored_tensors
from dzero.models.tensor_views import Readable
from dzero.utils.hub_cache import local_folder, read_bytes

BASE, HEAD = "model.", "lm_head."
"""Prefixes of names in a llama; one without head leaves out the first."""
DEFAULTS = {
    "llama": {**FIXED, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    "mixtral": {
        **MIXTURE_FIXED,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
"""Defaults of transformers for settings that a config.json leaves out, by type of model."""


def local_weights(folder: str, model: nn.Module) -> dict[str, Readable]:
    """Return the tensors of a folder, by name in the model; each is read when it is called.

    Tensors must have the names and shapes of the published model, or those that transformers converts to them when it
    loads a folder, such as one tensor per expert. Tied tensors may be stored under any of their names, and the prefix
    of a model without head may be absent.

    Args:
        folder: Folder of safetensors files, or `org/name` of a repository in the local cache of Hugging Face.
        model: Model from `build`.

    Returns:
        Readers of all tensors, whose headers have been checked. Stored tensors that the model does not use cause a
        warning.

    Raises:
        ValueError: If a tensor is missing or has another shape, or config.json is that of another llama or mixture.
    """
    folder = local_folder(folder)
    kind = _kind(model)
    if isinstance(model, Llama):
        check_config(Path(folder), model.shape)
    stored = stored_tensors(Path(folder))
    tensors = model.state_dict(keep_vars=True)
    published = {name: published_name(kind, name) for name in tensors}
    loaded = _loaded(model, stored)
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    found: dict[str, Readable] = {}
    missing: list[str] = []
    used: set[str] = set()
    for names in tied.values():
        made = [loaded[published[name]] for name in names if published[name] in loaded]
        if not made:
            missing += _names_in_folder(model, published[names[0]])
            continue
        shape, needed = list(made[0].shape), list(tensors[names[0]].shape)
        if shape != needed:
            raise ValueError(f"{made[0].where} has shape {shape}, the model needs {needed} for {published[names[0]]}")
        used.update(name for tensor in made for name in tensor.stored)
        found |= dict.fromkeys(names, made[0])
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors of the model are not in its safetensors files: {missing}")
    if unused := sorted(set(stored) - used):
        warnings.warn(f"{folder}: the model has no place for {unused}; they are not loaded", stacklevel=2)
    return found


def _loaded(model: nn.Module, stored: Mapping[str, Readable]) -> dict[str, Readable]:
    """Return the tensors of a folder by the names of `published_name`, made of those stored if the layouts differ."""
    if isinstance(model, HFDecoder):
        return as_loaded(model.model, stored)
    whole = {name: tensor for name, tensor in stored.items() if name.startswith((BASE, HEAD))}
    named = {BASE + name: tensor for name, tensor in stored.items() if name not in whole} | whole
    if not isinstance(model, MoE):
        return named
    conversions = from_published(model.shape)
    made = {target for each in conversions for target in each.targets}  # transformers names other tensors like that
    return convert_all(conversions, {name: tensor for name, tensor in named.items() if name not in made})


def _names_in_folder(model: nn.Module, published: str) -> tuple[str, ...]:
    """Return the names under which a folder has a tensor of the model, or its parts."""
    conversions = from_published(model.shape) if isinstance(model, MoE) else ()
    return next((each.sources for each in conversions if published in each.targets), (published,))


def check_config(folder: Path, shape: LlamaShape) -> None:
    """Raise an error unless config.json in a folder describes a llama, or a Mixtral for a mixture, of this shape."""
    kind, published, settings, fixed = "llama", "llama", SETTINGS, FIXED
    ours = llama_config(shape)
    if isinstance(shape, MoEShape):
        kind, published, settings, fixed = "moe", "mixtral", MIXTURE_SETTINGS, MIXTURE_FIXED
        ours = mixtral_config(shape)
        if change := settings_to_change(shape):
            raise ValueError(
                f"model.weights={folder}: of mixtures only Mixtral is read, which computes something else than this "
                f"one; set {' '.join(change)}"
            )
    file = folder / "config.json"
    theirs = _settings_of(file, DEFAULTS[published])
    other = f"take model=hf model.name_or_path={folder}"
    if theirs.get("model_type") != published:
        raise ValueError(f"{file}: model_type {theirs.get('model_type')!r} is no {published}: {other}")
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(
            f"{file}: its rotary positions are scaled ({rope}), those of model.kind={kind} are not: {other}"
        )
    theirs |= {
        "rope_theta": rope.get("rope_theta", theirs["rope_theta"]),
        "num_key_value_heads": theirs.get("num_key_value_heads") or theirs.get("num_attention_heads"),
    }
    if differs := {key: theirs[key] for key in fixed if theirs[key] != fixed[key]}:
        raise ValueError(f"{file}: {differs}, where model.kind={kind} has {fixed}: {other}")
    differ = [f"model.{settings[key]}={_word(theirs.get(key))}" for key in settings if theirs.get(key) != ours[key]]
    if differ:
        raise ValueError(f"{file}: it is of another model than this; set {' '.join(differ)}")


def _settings_of(file: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a config.json, with `defaults` for those that it leaves out."""
    if not os.path.lexists(file):
        raise FileNotFoundError(f"model.weights={file.parent}: the folder has no config.json")
    text = read_bytes(file)
    try:
        found: dict[str, Any] = {"tie_word_embeddings": False, **defaults} | json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: no configuration of a model ({error})") from error
    return found


def _kind(model: nn.Module) -> str:
    """Return the kind of the model in `published.KINDS`."""
    if isinstance(model, HFDecoder):
        return "hf"
    if isinstance(model, Llama):
        return "llama"
    raise TypeError(f"weights of {type(model).__name__}: only models that build() made read them")


def _word(value: Any) -> str:
    """Format a value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
