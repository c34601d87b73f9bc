"""Casts of a unit's inputs.

Models that add or normalize in fp32 pass fp32 to the next block. FSDP2 would cast all floating-point arguments of every
unit, including tables that are fp32 on purpose (sines of positions). Here, only the first one is cast, which the block
transforms. Of the whole model all arguments are cast but those without dimensions: such a number widens no tensor that
it meets, and may be one that 16 bits cannot hold, such as the count of tokens that Trainer divides its loss by.
"""

from __future__ import annotations

import copy
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.utils.torch_internals import tree_leaves, tree_map_only


def cast_all_inputs(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast all floating-point arguments of `module` that have dimensions to `dtype`; call this once."""
    module.register_forward_pre_hook(partial(_cast_all, dtype), with_kwargs=True)


def cast_first_input(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the first floating-point argument of `module` to `dtype`; call this once."""
    module.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)


def _cast_all(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    def other(value: Any) -> bool:
        if _is_record(value):
            return any(map(other, tree_leaves(vars(value))))
        return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 0 and value.dtype != dtype

    def cast(value: Any) -> Any:
        if not other(value):
            return value
        if isinstance(value, torch.Tensor):
            return value.to(dtype)
        found = copy.copy(value)
        vars(found).update(tree_map_only(object, cast, vars(value)))
        return found

    if not any(map(other, tree_leaves((args, kwargs)))):
        return None  # the containers stay the caller's own, such as a cache of keys and values
    found: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(object, cast, (args, kwargs))
    return found


def _is_record(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__")


def _cast(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return None if value.dtype == dtype else ((*args[:index], value.to(dtype), *args[index + 1 :]), kwargs)
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            return None if value.dtype == dtype else (args, {**kwargs, key: value.to(dtype)})
    return None
