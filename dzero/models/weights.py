"""Mapping of the tensors in a published folder to the parameters of a model."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from dzero.models.config import LlamaShape
from dzero.models.hf import HFDecoder
from dzero.models.hf_conversions import as_loaded
from dzero.models.llama import Llama
from dzero.models.moe import MoE
from dzero.models.published import FIXED, SETTINGS, llama_config, published_name
from dzero.models.safetensors_reader import stored_tensors
from dzero.models.tensor_views import Readable
from dzero.utils.hub_cache import local_folder, read_bytes

BASE = "model."
"""Prefix of names that a llama without head leaves out."""
DEFAULTS = {**FIXED, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""Defaults of transformers' LlamaConfig for settings that a config.json leaves out."""


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
        ValueError: If a tensor is missing or has another shape, or config.json is that of another llama.
    """
    folder = local_folder(folder)
    kind = _kind(model)
    if isinstance(model, Llama):
        check_llama(Path(folder), model.shape)
    stored = stored_tensors(Path(folder))
    tensors = model.state_dict(keep_vars=True)
    published = {name: published_name(kind, name) for name in tensors}
    loaded = as_loaded(model.model, stored) if isinstance(model, HFDecoder) else _by_name(stored, published.values())
    tied: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        tied.setdefault(id(tensor), []).append(name)
    found: dict[str, Readable] = {}
    missing: list[str] = []
    used: set[str] = set()
    for names in tied.values():
        given = [loaded[published[name]] for name in names if published[name] in loaded]
        if not given:
            missing.append(published[names[0]])
            continue
        shape, needed = list(given[0].shape), list(tensors[names[0]].shape)
        if shape != needed:
            raise ValueError(f"{given[0].where} has shape {shape}, the model needs {needed} for {published[names[0]]}")
        used.update(name for tensor in given for name in tensor.stored)
        found |= dict.fromkeys(names, given[0])
    if missing:
        raise ValueError(f"{folder}: {len(missing)} tensors of the model are not in its safetensors files: {missing}")
    if unused := sorted(set(stored) - used):
        warnings.warn(f"{folder}: the model has no place for {unused}; they are not loaded", stacklevel=2)
    return found


def _by_name(stored: Mapping[str, Readable], needed: Iterable[str]) -> dict[str, Readable]:
    """Return the stored tensors of a llama, by their whole names; the prefix of one without head may be absent."""
    return {name: stored[key] for name in needed for key in (name.removeprefix(BASE), name) if key in stored}


def check_llama(folder: Path, shape: LlamaShape) -> None:
    """Raise an error unless config.json in a folder describes a llama of this shape."""
    file = folder / "config.json"
    if not os.path.lexists(file):
        raise FileNotFoundError(f"model.weights={folder}: the folder has no config.json")
    text = read_bytes(file)
    try:
        theirs = DEFAULTS | json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file}: no configuration of a model ({error})") from error
    if theirs.get("model_type") != "llama":
        raise ValueError(
            f"{file}: model_type {theirs.get('model_type')!r} is no llama: take model=hf model.name_or_path={folder}"
        )
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ValueError(
            f"{file}: its rotary positions are scaled ({rope}), those of model.kind=llama are not: take model=hf "
            f"model.name_or_path={folder}"
        )
    theirs |= {
        "rope_theta": rope.get("rope_theta", theirs.get("rope_theta", 10_000.0)),
        "num_key_value_heads": theirs.get("num_key_value_heads") or theirs.get("num_attention_heads"),
    }
    ours = llama_config(shape)
    if other := {key: theirs[key] for key in FIXED if theirs[key] != FIXED[key]}:
        raise ValueError(
            f"{file}: {other}, where model.kind=llama has {FIXED}: take model=hf model.name_or_path={folder}"
        )
    differ = [f"model.{SETTINGS[key]}={_word(theirs.get(key))}" for key in SETTINGS if theirs.get(key) != ours[key]]
    if differ:
        raise ValueError(f"{file}: it is of another model than this; set {' '.join(differ)}")


def _kind(model: nn.Module) -> str:
    """Return the kind of the model in `published.KINDS`."""
    if isinstance(model, HFDecoder):
        return "hf"
    if isinstance(model, Llama) and not isinstance(model, MoE):
        return "llama"
    raise TypeError(f"weights of {type(model).__name__}: only models that build() made read them")


def _word(value: Any) -> str:
    """Format a value as the command line takes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
