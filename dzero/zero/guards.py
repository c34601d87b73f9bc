"""What a model does not take once it is cut, noticed where it happens and said in one line.

shard() of a model that is already cut           refused
load_state_dict(assign=True)                     copied, with a warning; refused for parameters on meta
a module of the root called outside its forward  refused where its parameters are cut at that moment
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from dzero.zero.unit import Unit, as_module


def refuse_cut(model: nn.Module) -> None:
    """Raises ValueError for a model that `fully_shard` or `shard` has cut, or a module of it."""
    cut = next((name for name, module in model.named_modules() if isinstance(module, FSDPModule)), None)
    if cut is not None:
        raise ValueError(
            f"{'module ' + cut if cut else 'the model'} is already cut by fully_shard() or shard(): call shard() once, "
            "on a whole model"
        )


def copy_assigned(model: nn.Module) -> None:
    """Let `load_state_dict(assign=True)` copy into the shards, which optimizer and units refer to."""
    for module in model.modules():
        if module._parameters:
            module.register_load_state_dict_pre_hook(_copy)  # type: ignore[no-untyped-call]


def _copy(module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: object) -> None:
    if not local_metadata.get("assign_to_params_buffers"):
        return
    if any(param.is_meta for param in module.parameters(recurse=False)):
        raise RuntimeError(
            f"load_state_dict(assign=True) of {prefix or 'parameters'} on meta: call "
            "sharded.model.to_empty(device=...) first, and load without assign"
        )
    local_metadata["assign_to_params_buffers"] = False
    warnings.warn(
        "load_state_dict(assign=True) of a sharded model copies the values: its shards belong to the optimizer as well",
        stacklevel=2,
    )


def refuse_outside_forward(root: Unit, others: list[Unit]) -> None:
    """Let a module whose parameters are the root's tell who calls it while they are shards, not gathered."""
    inside = {module for unit in others for each in unit.modules for module in as_module(each).modules()}
    cut = set(root.params.values())
    for top in root.modules:
        for name, module in as_module(top).named_modules():
            if module not in inside and name and any(param in cut for param in module.parameters(recurse=False)):
                module.register_forward_pre_hook(partial(_check_gathered, name, cut), prepend=True)


def _check_gathered(name: str, cut: set[nn.Parameter], module: nn.Module, args: tuple[Any, ...]) -> None:
    param = next((param for param in module._parameters.values() if param is not None), None)
    if param in cut and not any(isinstance(each, torch.distributed.tensor.DTensor) for each in args):
        raise RuntimeError(
            f"{name} is called outside of the model's forward, where its parameters are shards: call it in the model's "
            "forward, or make it a unit of its own (zero.units, or is_unit= of shard())"
        )
