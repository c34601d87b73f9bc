"""Adapters of peft (extra `peft`) in a model on the meta device, for `adapter=lora`.

    before injection       after injection                       trained   first values
    q_proj.weight          q_proj.base_layer.weight              no        those of the folder
                           q_proj.lora_A.default.weight          yes       drawn by peft's own initializer
                           q_proj.lora_B.default.weight          yes       zeros
                           q_proj.lora_magnitude_vector...       yes       with use_dora: norms of the folder's rows

All other parameters of the model keep their names, and are not trained either.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dzero.errors import converting, import_optional
from dzero.models.adapter_config import AdapterConfig
from dzero.models.hf import HFDecoder
from dzero.models.meta_init import Initialise
from dzero.models.tensor_views import Readable, RowNorms

NAME = "default"
"""Name of the adapter in the model, which peft's own `get_peft_model` gives it too."""
INSIDE = "base_model.model."
"""Prefix of the names of a model's tensors inside of a `PeftModel`."""
BASE = "base_layer."
"""Prefix of the names of a layer's own tensors, beside its adapter."""
MAGNITUDE = "lora_magnitude_vector."
"""Prefix of the name of the parameter that DoRA adds to a layer."""
INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Values of peft's `init_lora_weights` that leave the model's own weights as they are."""


@dataclass(frozen=True)
class Adapters:
    """Result of the injection of adapters into a model.

    Attributes:
        renamed: Names of the model's own tensors after the injection, by their names before.
        initializers: Initializer of each module of an adapter.
        magnitudes: Name of the weight whose row norms a parameter starts from, by its name.
    """

    renamed: Mapping[str, str]
    initializers: Mapping[nn.Module, Initialise]
    magnitudes: Mapping[str, str]

    def first_values(self, weights: Mapping[str, Readable]) -> dict[str, Readable]:
        """Return the tensors that parameters start from, by name, for `weights` by name before the injection."""
        own = {self.renamed[name]: value for name, value in weights.items()}
        return own | {name: RowNorms((own[weight],)) for name, weight in self.magnitudes.items()}


def add_adapters(model: nn.Module, config: AdapterConfig, base: str | None = None) -> Adapters:
    """Inject adapters into a model on meta, in place, and freeze all other parameters.

    Args:
        model: Decoder of transformers, as `build` returns it.
        config: Settings; with `kind=none`, nothing happens.
        base: Folder or name of the model that the adapters belong to, which their adapter_config.json names.

    Raises:
        ValueError: If no module of the model has the names that the settings ask for.
    """
    if config.kind == "none":
        return Adapters({name: name for name in model.state_dict()}, {}, {})
    assert isinstance(model, HFDecoder)
    peft = import_optional("peft", f"adapter={config.kind}", "peft")
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    settings = _lora_config(peft, config, base)
    known = f"this model has {_linear_names(model)}"
    with converting(_described(config), ValueError, repair=known), torch.device("meta"):
        peft.inject_adapter_in_model(settings, model.model, adapter_name=NAME, low_cpu_mem_usage=True)
    after: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        after.setdefault(id(tensor), []).append(name)
    renamed = {name: after[tensor].pop(0) for name, tensor in before.items()}
    magnitudes = {
        f"{name}.{MAGNITUDE}{NAME}.weight": f"{name}.{BASE}weight" for name in lora_layers(model) if config.use_dora
    }
    return Adapters(renamed, _initializers(peft, model, config), magnitudes)


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft put adapters into a model, or into the transformers model that a `HFDecoder` wraps."""
    return hasattr(adapted_part(model)[1], "peft_config")


def adapted_part(model: nn.Module) -> tuple[str, Any]:
    """Return the prefix and the module of the part of a model that peft knows, such as a `PeftModel`."""
    return ("model.", model.model) if isinstance(model, HFDecoder) else ("", model)


def base_of(model: nn.Module) -> Any:
    """Return the model of transformers inside of a `HFDecoder` or a `PeftModel`; any other model itself."""
    part = adapted_part(model)[1]
    return part.get_base_model() if hasattr(part, "get_base_model") else part


def settings_of(part: Any) -> tuple[str, Any]:
    """Return the name and the settings of the only adapter of the part of a model that peft knows.

    Raises:
        ValueError: If there are several adapters, one is no LoRA, or its initial values changed the model's weights.
    """
    (name, settings), *others = part.peft_config.items()
    if others:
        raise ValueError(
            f"the model has the adapters {[*part.peft_config]}: only one is saved; delete the others before"
        )
    if settings.peft_type != "LORA":
        raise ValueError(f"adapters of type {settings.peft_type.value}: only LORA is saved; save a checkpoint instead")
    if settings.init_lora_weights not in INITIAL:
        raise ValueError(
            f"init_lora_weights={settings.init_lora_weights!r} changed the model's own weights, to which the adapters "
            f"would be added again; take one of {INITIAL}"
        )
    found = copy.copy(settings)
    found.inference_mode = True
    return name, found


def saved_tensors(part: Any, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an adapter by the names that `PeftModel.save_pretrained` gives them.

    Args:
        part: Part of the model that peft knows.
        name: Name of the adapter.
        tensors: Whole tensors of the part's state dict; at least those of the adapter.
    """
    peft = import_optional("peft", "saving adapters", "peft")
    kept = peft.get_peft_model_state_dict(part, dict(tensors), adapter_name=name, save_embedding_layers=False)
    inside = "" if isinstance(part, peft.PeftModel) else INSIDE
    return {f"{inside}{each}": tensor.contiguous() for each, tensor in kept.items()}


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that have adapters of LoRA, by name."""
    peft = import_optional("peft", "a model with adapters", "peft")
    return {name: each for name, each in model.named_modules() if isinstance(each, peft.tuners.lora.LoraLayer)}


def own_name(name: str) -> str:
    """Return the name that a tensor of an adapted model has in the model without adapters."""
    return name.removeprefix(INSIDE).replace(f".{BASE}", ".")


def _lora_config(peft: Any, config: AdapterConfig, base: str | None) -> Any:
    """Return the settings as peft takes them; initial values are drawn later, by `_initializers`."""
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(Path(base).absolute()) if base is not None and Path(base).is_dir() else base,
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules,
        layers_to_transform=config.layers_to_transform,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        rank_pattern=dict(config.rank_pattern),
        alpha_pattern=dict(config.alpha_pattern),
    )


def _described(config: AdapterConfig) -> str:
    targets = "null" if config.target_modules is None else config.target_modules
    return f"adapter.target_modules={targets}: peft finds no such modules"


def _linear_names(model: nn.Module) -> list[str]:
    """Return the last parts of the names of a model's linear layers."""
    return sorted({name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)})


def _initializers(peft: Any, model: nn.Module, config: AdapterConfig) -> dict[nn.Module, Initialise]:
    """Return peft's initializer for each layer with an adapter, and none for the modules of the adapter inside it."""

    def draw(layer: Any) -> None:
        layer.reset_lora_parameters(NAME, True)

    known = peft.tuners.lora.Linear, peft.tuners.lora.Embedding
    users: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        users.setdefault(param, []).append(name)
    found: dict[nn.Module, Initialise] = {}
    for name, layer in lora_layers(model).items():
        own: Any = layer.base_layer
        if not isinstance(layer, known):
            raise ValueError(
                f"adapter.target_modules: {name} is a {type(own).__name__}; only linear layers and embeddings get "
                "adapters, so name others"
            )
        if config.use_dora and not isinstance(own, nn.Linear):
            raise ValueError(
                f"adapter.use_dora=true: {name} is a {type(own).__name__}, whose norms are not those of rows; name "
                "other adapter.target_modules, or take adapter.use_dora=false"
            )
        if other := next((each for each in users[own.weight] if not each.startswith(f"{name}.")), None):
            raise ValueError(
                f"adapter.target_modules: the weight of {name} is that of {other} too, which an adapter would leave as "
                "it is; name others"
            )
        inside = {*own.modules()}
        found |= {module: _nothing for module in layer.modules() if module not in inside}
        found[layer] = draw
    return found


def _nothing(module: nn.Module) -> None:
    """Draw nothing: the layer around the module does."""
