"""Another forward for modules that stay what they are: names, parameters and attributes do not change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

Forward = Callable[..., Any]


def wrap_method(modules: Sequence[nn.Module], method: str, wrap: Callable[[Forward], Forward]) -> None:
    """Give each module a subclass whose `method` is wrapped: one per class, so that equal ones share a compilation."""
    classes: dict[type[nn.Module], type[nn.Module]] = {}
    for module in dict.fromkeys(modules):
        cls = type(module)
        if cls not in classes:
            wrapped = {
                method: wrap(getattr(cls, method)),
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
            }
            classes[cls] = type(cls.__name__, (cls,), wrapped)
        module.__class__ = classes[cls]


def checkpointed(forward: Forward, **options: Any) -> Forward:
    """`forward`, whose inputs alone are kept for backward; the rest is computed again there."""

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return recomputed
