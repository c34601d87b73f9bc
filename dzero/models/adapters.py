"""Adapters of peft (extra `peft`) in a model on the meta device, for `adapter=lora`.

    before injection       after injection                       trained   first values
    q_proj.weight          q_proj.base_layer.weight              no        those of the folder
                           q_proj.lora_A.default.weight          yes       drawn by peft's own initializer
                           q_proj.lora_B.default.weight          yes       zeros
                           q_proj.lora_magnitude_vector...       yes       with use_dora: norms of the folder's rows
    lm_head.weight         lm_head.original_module.weight        no        those of the folder
                           lm_head.modules_to_save.default...    yes       with modules_to_save: the same

All other parameters of the model keep their names, and are not trained either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dzero.errors import converting, import_optional
from dzero.models.adapter_config import ALL_LINEAR, AdapterConfig
from dzero.models.adapter_names import BASE, COPY, MAGNITUDE, ORIGINAL, names_after, renamed, renamed_settings
from dzero.models.hf import HFDecoder
from dzero.models.llama import Llama
from dzero.models.llama_names import OURS, PUBLISHED
from dzero.models.merged_weights import lora_layers
from dzero.models.meta_init import Initialise
from dzero.models.tensor_views import Readable, RowNorms
from dzero.utils.torch_internals import uncompiled

NAME = "default"
"""Name of the adapter in the model, which peft's own `get_peft_model` gives it too."""


@dataclass(frozen=True)
class Adapters:
    """Result of the injection of adapters into a model.

    Attributes:
        renamed: Names of the model's own tensors after the injection, by their names before.
        initializers: Initializer of each module of an adapter.
        magnitudes: Name of the weight whose row norms a parameter starts from, by its name.
        copies: Name of the tensor that a tensor of a module that is trained whole starts from, by its name.
    """

    renamed: Mapping[str, str]
    initializers: Mapping[nn.Module, Initialise]
    magnitudes: Mapping[str, str]
    copies: Mapping[str, str]

    def first_values(self, weights: Mapping[str, Readable]) -> dict[str, Readable]:
        """Return the tensors that parameters start from, by name, for `weights` by name before the injection."""
        own = {self.renamed[name]: value for name, value in weights.items()}
        copied = {name: own[original] for name, original in self.copies.items() if original in own}
        return own | copied | {name: RowNorms((own[weight],)) for name, weight in self.magnitudes.items()}


def add_adapters(model: nn.Module, config: AdapterConfig, base: str | None = None) -> Adapters:
    """Inject adapters into a model on meta, in place, and freeze all other parameters.

    Args:
        model: Decoder of transformers, or a llama or mixture of the project, as `build` returns it.
        config: Settings; with `kind=none`, nothing happens. They name modules as they are published.
        base: Folder or name of the model that the adapters belong to, which their adapter_config.json names.

    Raises:
        ValueError: If no module of the model has the names that the settings ask for.
    """
    if config.kind == "none":
        return Adapters({name: name for name in model.state_dict()}, {}, {}, {})
    peft = import_optional("peft", f"adapter={config.kind}", "peft")
    before = {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    part, values = _part_and_settings(peft, model, config)
    common = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(Path(base).absolute()) if base is not None and Path(base).is_dir() else base,
    }
    trained_whole = _trained_whole(model, part, values["modules_to_save"] or ())
    settings = peft.LoraConfig(**common, **values)
    known = f"this model has {_linear_names(model)}"
    with converting(_described(config), ValueError, repair=known), torch.device("meta"):
        peft.inject_adapter_in_model(settings, part, adapter_name=NAME, low_cpu_mem_usage=True)
    for wrapper in map(part.get_submodule, trained_whole):
        wrapper.get_submodule(ORIGINAL).requires_grad_(False)
        wrapper.get_submodule(COPY).requires_grad_(True)
    if isinstance(model, Llama):  # as the folder of the adapters names modules
        settings = peft.LoraConfig(**common, **renamed_settings(values, PUBLISHED))
        model.peft_config = {NAME: settings}  # type: ignore[assignment]
    renamed_tensors = names_after(before, model.state_dict(keep_vars=True))
    magnitudes = {
        f"{name}.{MAGNITUDE}.{NAME}.weight": f"{name}.{BASE}weight" for name in lora_layers(model) if config.use_dora
    }
    copies = {
        name: name.replace(f".{COPY}.{NAME}.", f".{ORIGINAL}.")
        for name in model.state_dict()
        if f".{COPY}.{NAME}." in name
    }
    return Adapters(renamed_tensors, _initializers(peft, model, config), magnitudes, copies)


def has_adapters(model: nn.Module) -> bool:
    """Return whether peft put adapters into a model, or into the transformers model that a `HFDecoder` wraps."""
    return hasattr(adapted_part(model), "peft_config")


def adapted_part(model: nn.Module) -> Any:
    """Return the part of a model that peft knows, such as a `PeftModel`."""
    model = uncompiled(model)
    return model.model if isinstance(model, HFDecoder) else model


def base_of(model: nn.Module) -> Any:
    """Return the model of transformers inside of a `HFDecoder` or a `PeftModel`; any other model itself."""
    part = adapted_part(model)
    return part.get_base_model() if hasattr(part, "get_base_model") else part


class _Inside(nn.Module):
    """A llama as `model` inside of a module, where peft finds its layers by the names that it knows."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


def _part_and_settings(peft: Any, model: nn.Module, config: AdapterConfig) -> tuple[nn.Module, dict[str, Any]]:
    """Return the module that adapters are injected into, and the settings with the names of its modules."""
    values = {key: value for key, value in asdict(config).items() if key != "kind"}
    if isinstance(model, HFDecoder):
        return model.model, values
    assert isinstance(model, Llama)
    if config.target_modules is None:
        known = peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
        values["target_modules"] = [*known["llama"]]
    if config.target_modules == ALL_LINEAR:
        head = model.get_output_embeddings()
        linear = {name for name, each in model.named_modules() if isinstance(each, nn.Linear) and each is not head}
        values["target_modules"] = sorted({name.rpartition(".")[2] for name in linear})
    return _Inside(model), renamed_settings(values, OURS)


def _trained_whole(model: nn.Module, part: nn.Module, ends: Sequence[str]) -> list[str]:
    """Return the names of the modules of `part` whose names have one of these ends; peft finds them the same way.

    Raises:
        ValueError: If an end is that of no module, of modules that it does not name, or of one with tied weights.
    """
    words = PUBLISHED if isinstance(model, Llama) else {}
    users = Counter(param for each in model.modules() for param in each.parameters(recurse=False))
    every: list[str] = []
    for end in ends:
        told = f"adapter.modules_to_save=[{renamed(end, words)}]"
        found = [name for name, _ in part.named_modules() if renamed(name, words).endswith(renamed(end, words))]
        if not found:
            raise ValueError(f"{told}: no module has a name with this end; take the last part of one, such as lm_head")
        if other := [name for name in found if not f".{name}".endswith(f".{end}")]:
            raise ValueError(
                f"{told}: peft takes {renamed(other[0], words)} too, whose name has the same end; give more of the name"
            )
        for name in found:
            if any(users[param] > 1 for param in part.get_submodule(name).parameters()):
                raise ValueError(
                    f"{told}: the weight of {name} is that of another module too (tie_word_embeddings), which would be "
                    "trained apart from it; take a model whose weights are not tied, or adapters beside other modules"
                )
        every += found
    return every


def _described(config: AdapterConfig) -> str:
    if config.target_modules is None:
        return "adapter.target_modules=null: peft chooses no modules of this type of model, so name some"
    return f"adapter.target_modules={config.target_modules}: peft finds no such modules"


def _linear_names(model: nn.Module) -> list[str]:
    """Return the last parts of the published names of a model's linear layers."""
    words = PUBLISHED if isinstance(model, Llama) else {}
    found = {name.rpartition(".")[2] for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    return sorted(words.get(name, name) for name in found)


def _initializers(peft: Any, model: nn.Module, config: AdapterConfig) -> dict[nn.Module, Initialise]:
    """Return peft's initializer for each layer with an adapter, and none for the modules of the adapter inside it."""

    def draw(layer: Any) -> None:
        layer.reset_lora_parameters(NAME, True)

    known = peft.tuners.lora.Linear, peft.tuners.lora.Embedding
    users: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        users.setdefault(param, []).append(name)
    found: dict[nn.Module, Initialise] = {}
    layers: dict[str, Any] = lora_layers(model)
    for name, layer in layers.items():
        own = layer.base_layer
        if not isinstance(layer, known):
            while hasattr(own, "base_layer"):  # peft wraps a module once for each of its parameters
                own = own.base_layer
            fitting = sorted({each.rpartition(".")[2] for each in layers if isinstance(layers[each], known)})
            raise ValueError(
                f"adapter.target_modules={config.target_modules}: {name} is a {type(own).__name__}; only linear layers "
                f"and embeddings get adapters, so name others{(fitting and f', such as {fitting}') or ''}"
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
