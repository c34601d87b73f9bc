"""What a unit computes on, in its working dtype: models that add or normalise in fp32 hand fp32 to the next block.

FSDP2 would cast all floating-point arguments of every unit, also tables that are fp32 on purpose (positions' sines).
Here the first one is cast, which is what the block transforms; of the whole model's arguments FSDP2 casts all.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn


def cast_first_input(module: nn.Module, dtype: torch.dtype) -> None:
    """Let `module` see its first floating-point argument in `dtype`; called once."""
    module.register_forward_pre_hook(partial(_cast, dtype), with_kwargs=True)


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
