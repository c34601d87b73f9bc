"""Weights of a model with the adapters of peft merged in, each computed when it is read.

Layers are taken from a model of transformers on meta, with the same adapters as the one that was trained. So a merge
needs no module of the trained model, which may be cut over ranks or not be there at all.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dzero.errors import converting, import_optional
from dzero.models.adapter_names import BASE, COPY, ORIGINAL, names_after, saved_name, settings_from, why_unsaved
from dzero.models.hf import HFDecoder
from dzero.models.tensor_views import Readable, View


@dataclass(frozen=True)
class AdaptedDecoder:
    """A model of transformers on meta, with adapters.

    Attributes:
        decoder: The model.
        renamed: Names of its own tensors with adapters, by their names without.
        adapter: Name of the adapter.
    """

    decoder: HFDecoder
    renamed: Mapping[str, str]
    adapter: str


def adapted_decoder(decoder: HFDecoder, adapter: str, text: str) -> AdaptedDecoder:
    """Put adapters without values into a model on meta, by the text of an adapter_config.json.

    Raises:
        ValueError: If the settings are none of LoRA, or fit no module of the model.
    """
    peft = import_optional("peft", "merging adapters", "peft")
    with converting("its adapters have settings that peft does not read", Exception):
        settings = settings_from(text)
        reason = why_unsaved({adapter: settings})
    if reason := reason or ("lora_bias=True: biases of adapters are not merged" if settings.lora_bias else ""):
        raise ValueError(reason)
    before = {name: id(tensor) for name, tensor in decoder.model.state_dict(keep_vars=True).items()}
    with converting("its adapters do not fit the model", Exception), torch.device("meta"):
        peft.inject_adapter_in_model(settings, decoder.model, adapter_name=adapter, low_cpu_mem_usage=True)
    return AdaptedDecoder(decoder, names_after(before, decoder.model.state_dict(keep_vars=True)), adapter)


def merged_weights(adapted: AdaptedDecoder, values: Mapping[str, Readable]) -> dict[str, Readable]:
    """Return the tensors of a model without adapters, which are merged into them.

    Args:
        adapted: The model on meta.
        values: Tensors of the model with adapters, by their names in it.

    Raises:
        ValueError: If a tensor of a layer with adapters is missing.
    """
    layers = lora_layers(adapted.decoder.model)
    layer_of = {f"{layer}.{name}": layer for layer, each in layers.items() for name in each.state_dict()}
    last = _LastMerge()
    found: dict[str, Readable] = {}
    for name, value in values.items():
        layer = layer_of.get(name)
        if layer is None:
            if f".{COPY}." in f".{name}":
                found[saved_name(name, adapted.adapter) or name] = value
            elif f".{ORIGINAL}." not in f".{name}":
                found[name.replace(f".{BASE}", ".")] = value  # of a layer whose only adapter was deleted
        elif name == f"{layer}.{BASE}weight":
            own = [f"{BASE}weight", *(each for each in layers[layer].state_dict() if not each.startswith(BASE))]
            if missing := [each for each in own if f"{layer}.{each}" not in values]:
                raise ValueError(f"{layer} has adapters, whose {missing} are not there")
            parts = tuple(values[f"{layer}.{each}"] for each in own)
            found[f"{layer}.weight"] = MergedWeight(parts, tuple(own), layers[layer], last)
        elif name.startswith(f"{layer}.{BASE}"):
            found[f"{layer}.{name.removeprefix(f'{layer}.{BASE}')}"] = value
    return found


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that have adapters of LoRA, by name."""
    peft = import_optional("peft", "a model with adapters", "peft")
    return {name: each for name, each in model.named_modules() if isinstance(each, peft.tuners.lora.LoraLayer)}


@dataclass
class _LastMerge:
    """The weight that was merged last, since a weight is read in several pieces."""

    of: Any = None
    value: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True, eq=False)
class MergedWeight(View):
    """The weight of a layer with its adapter merged in by peft, in the dtype of the layer's own weight.

    Attributes:
        parts: The layer's own weight, and the tensors of its adapter.
        names: Their names in the layer.
        layer: The layer, on meta.
        last: Last weight that any of these computed.
    """

    parts: tuple[Readable, ...]
    names: tuple[str, ...]
    layer: nn.Module
    last: _LastMerge

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.parts[0].shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, on the device of the parts."""
        return self()[tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the whole merged weight, computed on the device of the parts."""
        if self.last.of is not self:
            self.last.of, self.last.value = None, torch.empty(0)  # freed before the next one is computed
            own = {name: part() for name, part in zip(self.names, self.parts, strict=True)}
            # peft loads adapters in fp32, whatever the dtype of the model.
            values = {name: value.clone() if name.startswith(BASE) else value.float() for name, value in own.items()}
            named = dict(self.layer.named_parameters())
            params = {id(named[name]): nn.Parameter(value) for name, value in values.items()}
            layer: Any = copy.deepcopy(self.layer, params)  # with these values instead of those on meta
            layer.merge()
            self.last.of, self.last.value = self, layer.base_layer.weight.detach()
        return self.last.value
