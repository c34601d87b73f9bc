"""Casts of a unit's inputs, and ownership of its outputs.

Models that add or normalize in fp32 pass fp32 to the next block. FSDP2 would cast all floating-point arguments of every
unit, including tables that are fp32 on purpose (sines of positions). Here, only the first one is cast, which the block
transforms. FSDP2 still casts all arguments of the whole model.

FSDP2 detects the backward of a unit by its output, and misses it if the output is a view that is written in place. An
embedding that is cut by tensor parallelism returns such a view.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.utils.torch_internals import is_view


def cast_first_input(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the first floating-point argument of `module` to `dtype`; call this once."""
    module.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)


def own_output(module: nn.Module) -> None:
    """Make an embedding return its own memory instead of a view; call this once, before `fully_shard`."""
    if isinstance(module, nn.Embedding):
        module.register_forward_hook(_copy_view)


def _copy_view(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return output.clone() if isinstance(output, torch.Tensor) and is_view(output) else None


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
