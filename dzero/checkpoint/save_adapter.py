"""Adapters of peft in a sharded model: a folder of them alone, or the model's weights with the adapters merged in.

    OUT/                            contents, as `PeftModel.save_pretrained` writes them
        adapter_config.json         settings, and base_model_name_or_path
        adapter_model.safetensors   adapters, named as in `PeftModel`

A folder of adapters is small, so all of them are gathered before rank 0 writes. Merged weights are gathered one by one,
and computed by peft on rank 0.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dzero.checkpoint.errors import CheckpointError, reported_as_checkpoint_error
from dzero.checkpoint.first_rank import on_first_rank
from dzero.checkpoint.store import PARTIAL, Directory
from dzero.errors import import_optional
from dzero.models.adapters import BASE, adapted_part, lora_layers, own_name, saved_tensors, settings_of
from dzero.zero.sharded import Sharded

WEIGHTS = "adapter_model.safetensors"


def save_adapter(sharded: Sharded, folder: Path) -> None:
    """Write the adapters of a sharded model into a new folder, for `PeftModel.from_pretrained`. All ranks call this.

    Raises:
        ValueError: If the model has other adapters than one of LoRA, or such that changed the model's own weights.
        CheckpointError: If the folder exists, or cannot be written; on all ranks.
    """
    prefix, part = adapted_part(sharded.model)
    name, settings = settings_of(part)
    own = {each for each, param in sharded.model.named_parameters() if param.requires_grad or ".lora_" in each}
    tensors = {
        each.removeprefix(prefix): whole_of(tensor)
        for each, tensor in sharded.model.state_dict().items()
        if each in own
    }
    on_first_rank(sharded, lambda: _write(folder.absolute(), settings, saved_tensors(part, name, tensors)))


def merged_tensors(model: nn.Module, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor | MergedWeight]]:
    """Yield the tensors of a sharded model's state dict as those of the model without adapters, which are merged in."""
    settings_of(adapted_part(model)[1])
    layers = lora_layers(model)
    layer_of = {f"{layer}.{name}": layer for layer, each in layers.items() for name in each.state_dict()}
    for name, tensor in state.items():
        layer = layer_of.get(name)
        if layer is None or name.startswith(f"{layer}.{BASE}"):
            merged = name == f"{layer}.{BASE}weight"
            yield own_name(name), MergedWeight(layers[layer], layer, state) if layer and merged else tensor


class MergedWeight:
    """The weight of a layer with its adapter merged in, gathered and computed when it is needed.

    Attributes:
        dtype: Dtype of the layer's own weight, in which peft merges.
        shape: Shape of it.
    """

    def __init__(self, layer: nn.Module, name: str, state: Mapping[str, Tensor]) -> None:
        self._layer, own = layer, f"{name}."
        self._tensors = {each.removeprefix(own): value for each, value in state.items() if each.startswith(own)}
        weight = self._tensors[f"{BASE}weight"]
        self.dtype, self.shape = weight.dtype, weight.shape

    def numel(self) -> int:
        """Return the number of elements."""
        return self.shape.numel()

    @torch.no_grad()
    def full_tensor(self) -> Tensor:
        """Return the merged weight, on the CPU; on other ranks than 0, the layer's own weight. Collective."""
        whole = {name: whole_of(tensor) for name, tensor in self._tensors.items()}
        if dist.get_rank() == 0:
            # peft loads adapters in fp32, whatever the dtype of the model.
            values = {name: value if name.startswith(BASE) else value.float() for name, value in whole.items()}
            params = {id(param): nn.Parameter(values[name]) for name, param in self._layer.named_parameters()}
            layer: Any = copy.deepcopy(self._layer, params)  # with these values instead of the shards
            layer.merge()
            whole = {f"{BASE}weight": layer.base_layer.weight.detach()}
        return whole[f"{BASE}weight"]


def whole_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the sharded model, gathered, on the CPU. Collective."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()


def _write(folder: Path, settings: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write the adapters; the folder gets its name when all of it is on disk."""
    safetensors = import_optional("safetensors.torch", "saving adapters", "peft")
    unfinished = folder.with_name(folder.name + PARTIAL)
    for path in (folder, unfinished):
        if os.path.lexists(path):
            raise CheckpointError(str(path), "it is there already: remove it, or choose another folder")
    with reported_as_checkpoint_error(unfinished):
        unfinished.mkdir()
    try:
        with reported_as_checkpoint_error(folder), Directory(unfinished) as directory:
            directory.write(WEIGHTS, safetensors.save(dict(tensors), metadata={"format": "pt"}))
            settings.save_pretrained(str(unfinished))
            directory.sync()
            unfinished.rename(folder)
        with Directory(folder.parent) as above:
            above.sync()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
