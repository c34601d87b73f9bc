"""Names and settings of an adapter in the folder that peft loads, and in a model.

    in the model                             in adapter_model.safetensors, behind `base_model.model.`
    q_proj.lora_A.default.weight             q_proj.lora_A.weight
    q_proj.lora_magnitude_vector.default...  q_proj.lora_magnitude_vector
    wte.lora_embedding_A.default             wte.lora_embedding_A
    lm_head.modules_to_save.default.weight   lm_head.weight
    q_proj.base_layer.weight                 none: it is the base's

A llama of the project has adapters beside modules with its own names; those in the folder are the published ones.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dzero.errors import import_optional

INSIDE = "base_model.model."
"""Prefix of the names of a model's tensors inside of a `PeftModel`."""
BASE = "base_layer."
"""Prefix of the names of a layer's own tensors, beside its adapter."""
COPY, ORIGINAL = "modules_to_save", "original_module"
"""Parts of the names of a module that is trained whole, and of the untrained one that it replaces."""
MAGNITUDE = "lora_magnitude_vector"
"""Part of the name of the parameter that DoRA adds to a layer."""
INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Values of peft's `init_lora_weights` that leave the model's own weights as they are."""
FILE = "adapter_config.json"
NAMED = ("target_modules", "exclude_modules", "modules_to_save", "rank_pattern", "alpha_pattern")
"""Settings that name modules."""


def settings_of(peft_config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the name and the settings of the only adapter of a model, as they are saved.

    Raises:
        ValueError: If there are several adapters.
    """
    if len(peft_config) != 1:
        raise ValueError(f"the model has the adapters {[*peft_config]}: only one is saved; delete the others before")
    ((name, settings),) = peft_config.items()
    found = copy.copy(settings)
    found.inference_mode = True
    return name, found


def why_base_changed(settings: Any) -> str:
    """Return why an adapter means nothing beside the published weights, which its first values changed; or nothing."""
    first_values = getattr(settings, "init_lora_weights", True)
    if first_values in INITIAL:
        return ""
    return (
        f"init_lora_weights={first_values!r} changed the model's own weights, to which the adapters would be added "
        f"again: merge the adapter of the trained model (merge=True), or take one of {INITIAL}"
    )


def settings_text(settings: Any) -> str:
    """Return the text of adapter_config.json, as peft writes it; lists that peft keeps as sets are sorted."""
    with TemporaryDirectory() as folder:
        settings.save_pretrained(folder)
        found = json.loads((Path(folder) / FILE).read_text())
    for key in NAMED:
        if isinstance(found.get(key), list):
            found[key] = sorted(found[key])
    return json.dumps(found, indent=2, sort_keys=True) + "\n"


def settings_from(text: str) -> Any:
    """Return the settings in the text of an adapter_config.json, as peft reads it."""
    peft = import_optional("peft", "merging adapters", "peft")
    with TemporaryDirectory() as folder:
        (Path(folder) / FILE).write_text(text)
        return peft.PeftConfig.from_pretrained(folder)


def names_after(before: Mapping[str, int], tensors: Mapping[str, object]) -> dict[str, str]:
    """Return the names of a model's tensors after adapters were injected, by those before; tied ones have several.

    Tensors of layers that peft left out (`layer_replication`) are not among them.

    Args:
        before: Identity (`id`) of each tensor before, by name.
        tensors: Tensors after the injection, by name.
    """
    after: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        after.setdefault(id(tensor), []).append(name)
    return {name: after[tensor].pop(0) for name, tensor in before.items() if tensor in after}


def renamed_settings(values: Mapping[str, Any], words: Mapping[str, str]) -> dict[str, Any]:
    """Return settings in which modules have other names; see `renamed`."""

    def each(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {renamed(name, words): entry for name, entry in value.items()}
        return value if value is None else [renamed(name, words) for name in value]

    return {key: each(value) if key in NAMED and not isinstance(value, str) else value for key, value in values.items()}


def renamed(name: str, words: Mapping[str, str]) -> str:
    """Return a name, or a pattern of names, with each of its `words` replaced."""
    return re.sub(r"[A-Za-z_]\w*", lambda found: words.get(found[0], found[0]), name)
