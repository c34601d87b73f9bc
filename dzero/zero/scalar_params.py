"""Parameters without dimensions (such as CLIP's temperature), which are sharded with one dimension.

FSDP2 shards rows, so such a parameter gets shape (1,), and rank 0 has its only row. Masters, moments, gradients and
state dicts have this shape. In forward, the model sees a tensor without dimensions, as it was written.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dzero.utils.param_attributes import kept_attributes
from dzero.zero.fsdp_internals import gather_without_dims
from dzero.zero.unit import Unit
from dzero.zero.units import swap

Places = set[tuple[nn.Module, str]]
"""Locations of parameters: the module, and the attribute there."""


def widen(model: nn.Module) -> Places:
    """Give parameters without dimensions shape (1,), wherever `model` has them, and return their locations."""
    found = {
        (module, attribute): param
        for module in model.modules()
        for attribute, param in module.named_parameters(recurse=False)
        if param.ndim == 0 and param.is_floating_point()
    }
    wide = {param: nn.Parameter(param.detach().view(1), param.requires_grad) for param in {*found.values()}}
    with kept_attributes(model):
        swap(model.modules(), wide)
    for module in {module for module, _ in found}:
        names = [attribute for of, attribute in found if of is module]
        module.register_load_state_dict_pre_hook(_Widened(names))  # type: ignore[no-untyped-call]
    return {*found}


def names_of(model: nn.Module, scalars: Places) -> frozenset[str]:
    """Return all names in `model` of the parameters at `scalars`."""
    named = [
        (name, *each)
        for name, module in model.named_modules(remove_duplicate=False)
        for each in scalars
        if each[0] is module
    ]
    return frozenset(f"{name}.{attribute}" if name else attribute for name, _, attribute in named)


def narrow_in_forward(unit: Unit, scalars: Places) -> None:
    """Make FSDP2 gather the parameters at `scalars` without dimensions; call this once, when the unit is sharded."""
    if scalars:
        gather_without_dims(unit.modules[0], scalars)


class _Widened:
    """Hook that gives tensors without dimensions in a state dict shape (1,) before they are loaded."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for name in self._names:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                state_dict[prefix + name] = value.view(1)
