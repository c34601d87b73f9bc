"""Hooks around the forward of a unit, which `torch.compile` leaves alone, as it does FSDP2's own.

`module.compile()` before or after `shard()` compiles each function that the module's call runs by itself: its forward,
and each hook. With `fullgraph=True` a hook that looks at more than tensors would end the run, and any other would cost
a graph of its own. A whole model that is compiled breaks its graph at FSDP2's hooks in any case. What belongs into the
graph of a block, because it is of a module inside of one, does not use this file, which all packages with units share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def before_forward(module: nn.Module, hook: Callable[..., Any], **options: bool) -> RemovableHandle:
    """Register a hook before the forward of `module`; `options` are those of `register_forward_pre_hook`."""
    return module.register_forward_pre_hook(_eager(hook), **options)


def after_forward(module: nn.Module, hook: Callable[..., Any], **options: bool) -> RemovableHandle:
    """Register a hook after the forward of `module`; `options` are those of `register_forward_hook`."""
    return module.register_forward_hook(_eager(hook), **options)


def _eager(hook: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(*args, **kwargs)

    eager: Callable[..., Any] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    return eager
