"""A model with an adapter of peft, on meta: which tensors its folders hold, and how each is computed.

    peft's own function          gives here
    get_peft_model               the names of all tensors, and which of them are one tensor under several names
    get_peft_model_state_dict    the names in adapter_model.safetensors, and the tensor behind each
    unload, merge                the names in the merged model, and the values of each layer with an adapter

peft knows its methods; none is known here. The model is built from the texts of config.json and adapter_config.json, so
that no module of the trained model is needed, which may be cut over ranks or not be there at all.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dzero.errors import converting, import_optional
from dzero.models.adapter_names import BASE, INSIDE, ORIGINAL, names_after, settings_from, why_base_changed
from dzero.models.hf import decoder_from
from dzero.models.tensor_views import Readable, View
from dzero.utils.torch_internals import intercept, tree_leaves

ALONE = "save the adapter alone (merge=False)"


@dataclass(frozen=True, eq=False)
class AdaptedModel:
    """A `PeftModel` on meta.

    Attributes:
        model: The model.
        adapter: Name of its adapter.
        settings: Settings of its adapter.
        renamed: Names of the tensors in the model, by their names in the model of transformers without adapter.
        sources: What `_sources` found, by name of layer.
    """

    model: Any
    adapter: str
    settings: Any
    renamed: Mapping[str, str]
    sources: dict[str, Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]] = field(default_factory=dict)

    def placed(self, values: Mapping[str, Readable]) -> dict[str, Readable]:
        """Return `values` by the names in the model; a tensor with several names, of which one is there, has them all.

        Names may lack the prefix of a `PeftModel`, and layers may still be wrapped for an adapter that was deleted.

        Raises:
            ValueError: If the model has no such tensor.
        """
        tensors = self.model.state_dict(keep_vars=True)
        placed: dict[str, Readable] = {}
        by_memory: dict[object, Readable] = {}
        for name, value in values.items():
            plain = name.replace(f".{BASE}", ".").replace(f".{ORIGINAL}.", ".")
            names = [name, f"{INSIDE}{name}", plain, f"{INSIDE}{plain}"]
            own = next((each for each in names if each in tensors), None)
            if own is None:
                raise ValueError(f"{value.where}: a {self._base_name} with this adapter has no such tensor")
            placed[own] = value
            by_memory.setdefault(_memory(tensors[own]), value)
        tied = {name: by_memory.get(_memory(tensor)) for name, tensor in tensors.items()}
        return {name: value for name, value in tied.items() if value is not None} | placed

    def adapter_tensors(self, placed: Mapping[str, Readable], *, embeddings: bool = False) -> dict[str, Readable]:
        """Return the tensors of adapter_model.safetensors, by their names there.

        Args:
            placed: Result of `placed`.
            embeddings: Whether input and output embedding belong to them, because their sizes are not the base's.

        Raises:
            ValueError: If a tensor is missing, or peft computes one in a way that is not followed here.
        """
        peft = import_optional("peft", "saving adapters", "peft")
        if reason := why_base_changed(self.settings):
            raise ValueError(reason)
        tensors = self.model.state_dict(keep_vars=True)
        model = self.model
        if self.settings.is_prompt_learning:
            # What a prompt encoder gives is computed and copied to the CPU, which tensors on meta do not allow.
            zeros = {name: torch.zeros_like(tensors[name], device="cpu") for name in self._prompt_names()}
            model = _with_values(model, zeros)
        saved = peft.get_peft_model_state_dict(
            model,
            state_dict=tensors,
            adapter_name=self.adapter,
            save_embedding_layers=embeddings,
        )
        names = {id(tensor): name for name, tensor in tensors.items()}
        return {
            name: self._value(names[id(tensor)], placed)
            if id(tensor) in names
            else self._computed(name, tuple(tensor.shape), placed)
            for name, tensor in saved.items()
        }

    def merged_tensors(self, placed: Mapping[str, Readable]) -> dict[str, Readable]:
        """Return the tensors of the model of transformers with the adapter merged in, by their names there.

        Raises:
            ValueError: If peft does not merge adapters of this kind, or a tensor is missing.
        """
        if self.settings.is_prompt_learning or not hasattr(self.model.base_model, "merge_and_unload"):
            raise ValueError(f"adapters of type {kind_of(self.settings)} are not merged into weights: {ALONE}")
        layers, last = dict(self._layers()), _LastMerge()
        merged: dict[str, Readable] = {}
        done: set[str] = set()
        for name in self.model.state_dict():
            words = name.split(".")
            prefixes = (".".join(words[:count]) for count in range(len(words)))
            prefix = next((each for each in prefixes if each in layers), None)
            if prefix is not None:
                if prefix not in done:
                    done.add(prefix)
                    merged |= self._merged_layer(prefix, layers[prefix], placed, last)
            elif name.startswith(INSIDE):
                merged[name] = self._value(name, placed)
        return {name.removeprefix(INSIDE): value for name, value in merged.items()}

    def _layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the outermost modules that peft's unloading replaces, by name in the model."""
        inside: set[nn.Module] = set()
        for name, module in self.model.named_modules():
            is_replaced = hasattr(module, "unload_and_optionally_merge_module") or hasattr(module, "base_layer")
            if name.startswith(INSIDE) and is_replaced and module not in inside:
                inside |= {*module.modules()}
                yield name, module

    def _merged_layer(
        self, prefix: str, layer: nn.Module, placed: Mapping[str, Readable], last: _LastMerge
    ) -> dict[str, Readable]:
        """Return the tensors that a layer has after unloading, by name in the model."""
        merge = _LayerMerge(layer, self.adapter, last) if _computes(layer) else None
        merged: dict[str, Readable] = {}
        for name, (names, shape) in self._sources(prefix, layer).items():
            parts = tuple(self._value(f"{prefix}.{each}", placed) for each in names)
            merged[f"{prefix}.{name}"] = parts[0] if merge is None else MergedTensor(parts, names, name, shape, merge)
        return merged

    def _sources(self, prefix: str, layer: nn.Module) -> Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]]:
        """Return the names of the layer's tensors that each tensor after unloading comes from, and its shape.

        The first is the one whose place it takes. Found once, since copies and trials of all layers take seconds.
        """
        if prefix not in self.sources:
            own = {id(tensor): name for name, tensor in layer.state_dict(keep_vars=True).items()}
            unloaded = _unloaded(_with_values(layer, {}), merge=False).state_dict(keep_vars=True)
            others: list[str] = []
            if _computes(layer):
                _try_merge(prefix, layer)
                others = [*own.values()]
            self.sources[prefix] = {
                name: (tuple(dict.fromkeys([own[id(tensor)], *others])), tuple(tensor.shape))
                for name, tensor in unloaded.items()
            }
        return self.sources[prefix]

    def _computed(self, name: str, shape: tuple[int, ...], placed: Mapping[str, Readable]) -> Readable:
        """Return a tensor of the adapter that peft computes from the prompt encoder."""
        if not self.settings.is_prompt_learning:
            raise ValueError(f"{name}: peft computes it from the adapter's tensors while it saves; merge the adapter")
        names = self._prompt_names()
        return _Prompts(tuple(self._value(each, placed) for each in names), names, name, shape, self)

    def _prompt_names(self) -> tuple[str, ...]:
        prefix = f"prompt_encoder.{self.adapter}."
        return tuple(name for name in self.model.state_dict() if name.startswith(prefix))

    def _value(self, name: str, placed: Mapping[str, Readable]) -> Readable:
        if name not in placed:
            raise ValueError(f"{name}: the tensor is not there")
        return placed[name]

    @property
    def _base_name(self) -> str:
        return type(self.model.get_base_model()).__name__


@lru_cache(maxsize=2)  # weights() of every step of a trainer asks for the same one
def adapted_model(config: str, adapter: str, text: str) -> AdaptedModel:
    """Return a model with an adapter on meta.

    Args:
        config: Text of config.json, whose `architectures` names the class.
        adapter: Name of the adapter.
        text: Text of adapter_config.json.

    Raises:
        ValueError: If peft does not read the settings, or they fit no module of the model.
    """
    peft = import_optional("peft", "a model with adapters", "peft")
    with converting("its adapters have settings that peft does not read", Exception):
        settings = settings_from(text)
    given = copy.copy(settings)
    settings.inference_mode = False
    if why_base_changed(settings):
        settings.init_lora_weights = True  # first values, which nobody reads here
    decoder = decoder_from(json.loads(config)).model
    before = {name: id(tensor) for name, tensor in decoder.state_dict(keep_vars=True).items()}
    cannot = f"peft makes no adapter of type {kind_of(settings)} without the model's values, as saving it takes"
    with converting(cannot, Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # told when the trained model was made
        model = peft.get_peft_model(decoder, settings, adapter_name=adapter, low_cpu_mem_usage=True)
    return AdaptedModel(model, adapter, given, names_after(before, model.state_dict(keep_vars=True)))


def kind_of(settings: Any) -> str:
    """Return the name of the method that settings of peft are of, such as LORA."""
    return str(getattr(settings.peft_type, "value", settings.peft_type))


def lora_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of a model that have adapters of LoRA, by name."""
    peft = import_optional("peft", "a model with adapters", "peft")
    return {name: each for name, each in model.named_modules() if isinstance(each, peft.tuners.lora.LoraLayer)}


def _memory(tensor: Tensor) -> object:
    """Return what tied tensors have in common: peft may make another parameter over the same memory, on meta too."""
    return id(tensor.untyped_storage()), tensor.storage_offset(), tensor.shape, tensor.stride()


def _computes(layer: nn.Module) -> bool:
    """Return whether merging computes values, rather than take a module that was trained whole."""
    whole = getattr(layer, "modules_to_save", None)
    return whole is None or any(hasattr(module, "base_layer") for module in whole.values())


def _unloaded(layer: Any, *, merge: bool) -> nn.Module:
    """Return the module that peft puts in the place of a layer with an adapter, which it may change."""
    module: nn.Module
    if hasattr(layer, "unload_and_optionally_merge_module"):
        module = layer.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
        return module
    if merge:
        layer.merge(safe_merge=False, adapter_names=None)
    module = layer.get_base_layer()
    return module


def _with_values(module: Any, values: Mapping[str, Tensor]) -> Any:
    """Return a copy of a module on meta, with these values of tensors by name; the others are those on meta."""
    tensors = module.state_dict(keep_vars=True)
    same = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    for name, value in values.items():
        is_param = isinstance(tensors[name], nn.Parameter)
        same[id(tensors[name])] = nn.Parameter(value, requires_grad=False) if is_param else value
    return copy.deepcopy(module, same)


def _try_merge(prefix: str, layer: nn.Module) -> None:
    """Merge a copy of a layer, so that what peft refuses is refused before anything is written or trained.

    The copy is on meta. If an operator needs values, or some are in no state dict, it gets random ones on the CPU.
    """
    if not hasattr(layer, "unload_and_optionally_merge_module") and not hasattr(layer, "merge"):
        raise ValueError(f"{prefix}: peft does not merge a {type(layer).__name__}: {ALONE}")
    tensors = layer.state_dict()
    with torch.no_grad():
        if all(name in tensors for name, buffer in layer.named_buffers() if buffer.is_meta):
            with suppress(RuntimeError, ValueError):
                _unloaded(_with_values(layer, tensors), merge=True)
                return
        values = {name: _any_values(tensor) for name, tensor in tensors.items()}
        with converting(f"{prefix}: peft does not merge its adapter", Exception, repair=ALONE):
            _merged(_with_values(layer, values))


def _merged(layer: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer with values, merged; raise ValueError if that takes values that are on meta."""
    with intercept(_refuse_meta):
        tensors = _unloaded(layer, merge=True).state_dict()
    if lost := next((name for name, tensor in tensors.items() if tensor.is_meta), None):
        raise ValueError(f"peft merges {lost} from values that are in no state dict: {ALONE}")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _refuse_meta(func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator; some, such as an addition in place, would do nothing in silence with an operand on meta."""
    tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    if len({each.is_meta for each in tensors if each.dim()}) > 1:
        raise ValueError(f"peft merges an adapter from values that are in no state dict ({func}): {ALONE}")
    return func(*args, **kwargs)


def _any_values(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.rand(tensor.shape, dtype=tensor.dtype, generator=torch.Generator().manual_seed(0))
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


@dataclass
class _LastMerge:
    """The tensors that were computed last, since a tensor is read in several pieces."""

    of: Any = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _LayerMerge:
    """Merge of one layer on meta; `last` is shared by all layers."""

    layer: nn.Module
    adapter: str
    last: _LastMerge

    @torch.no_grad()
    def tensors(self, names: Sequence[str], parts: Sequence[Readable]) -> Mapping[str, Tensor]:
        """Return the tensors of the merged layer, computed on the device of the parts."""
        if self.last.of is not self:
            peft = import_optional("peft", "merging adapters", "peft")
            self.last.of, self.last.tensors = None, {}  # freed before the next ones are computed
            values = {name: part().clone() for name, part in zip(names, parts, strict=True)}
            layer = _with_values(self.layer, values)
            del values
            # peft loads adapters in fp32, whatever the dtype of the model.
            peft.tuners.tuners_utils.cast_adapter_dtype(layer, self.adapter)
            self.last.of, self.last.tensors = self, _merged(layer)
        return self.last.tensors


@dataclass(frozen=True, eq=False)
class MergedTensor(View):
    """A tensor of a layer with its adapter merged in by peft, in the dtype of the layer's own tensor.

    Attributes:
        parts: Tensors of the layer and its adapter; the first is the one that this takes the place of.
        names: Their names in the layer.
        name: Name of the tensor in the merged layer.
        whole: Its shape.
        merge: Merge of the layer.
    """

    parts: tuple[Readable, ...]
    names: tuple[str, ...]
    name: str
    whole: tuple[int, ...]
    merge: _LayerMerge

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.whole

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, on the device of the parts."""
        return self()[tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))]

    def __call__(self) -> Tensor:
        """Return the whole tensor, computed on the device of the parts."""
        return self.merge.tensors(self.names, self.parts)[self.name]


@dataclass(frozen=True, eq=False)
class _Prompts(View):
    """A tensor that peft computes on saving: what a prompt encoder gives for every virtual token."""

    parts: tuple[Readable, ...]
    names: tuple[str, ...]
    name: str
    whole: tuple[int, ...]
    adapted: AdaptedModel

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return self.whole

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, on the device of the parts."""
        return self()[tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Return the whole tensor, computed on the device of the parts."""
        peft = import_optional("peft", "saving adapters", "peft")
        values = {name: part() for name, part in zip(self.names, self.parts, strict=True)}
        model = _with_values(self.adapted.model, values)
        saved = peft.get_peft_model_state_dict(
            model, state_dict={}, adapter_name=self.adapted.adapter, save_embedding_layers=False
        )
        tensor: Tensor = saved[self.name]
        return tensor
