"""Parameters without dims (CLIP's temperature): shards of one element, and in forward what they were.

FSDP2 cuts rows, so such a parameter becomes one of shape (1,), whose only row is rank 0's; masters, moments, gradients
and state dicts have that shape. The model computes with a tensor without dims, as it was written. This needs what FSDP2
keeps to itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dzero.zero.deferred_grads import groups_of
from dzero.zero.unit import Unit
from dzero.zero.units import swap

Places = set[tuple[nn.Module, str]]
"""Of parameters: the module, and the attribute there."""


def widen(model: nn.Module) -> Places:
    """Give parameters without dims one, wherever `model` has them; return where that is."""
    found = {
        (module, attribute): param
        for module in model.modules()
        for attribute, param in module.named_parameters(recurse=False)
        if param.ndim == 0 and param.is_floating_point()
    }
    wide = {param: nn.Parameter(param.detach().view(1), param.requires_grad) for param in {*found.values()}}
    swap(model.modules(), wide)
    for module in {module for module, _ in found}:
        names = [attribute for of, attribute in found if of is module]
        module.register_load_state_dict_pre_hook(_Widened(names))  # type: ignore[no-untyped-call]
    return {*found}


def narrow_in_forward(unit: Unit, scalars: Places) -> None:
    """Let FSDP2 gather those of `scalars` as tensors without dims; called once, when the unit is cut."""
    for group in groups_of(unit.modules[0]) if scalars else ():
        for held in group.fsdp_params:
            if (held._module_info.module, held._module_info.param_name) in scalars:
                held._orig_size, held._contiguous_orig_stride = torch.Size([]), ()


def widen_gradient(held: Any) -> None:
    """Before FSDP2 reduces: the gradient of one that it gathered without dims gets one."""
    own, waiting = held._unsharded_param.grad, held.unsharded_accumulated_grad
    if own is not None or waiting is not None:
        held._unsharded_param.grad = None
        both = own if waiting is None else waiting if own is None else waiting + own
        held.unsharded_accumulated_grad = both.view(1)


class _Widened:
    """What a state dict has without dims gets one, before it is loaded."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: object) -> None:
        for name in self._names:
            value = state_dict.get(prefix + name)
            if isinstance(value, torch.Tensor) and value.ndim == 0:
                state_dict[prefix + name] = value.view(1)
