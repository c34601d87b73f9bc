"""Attributes that users set on parameters, kept where the library replaces a parameter by another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from dzero.utils.torch_internals import registered


@contextmanager
def kept_attributes(model: nn.Module) -> Iterator[None]:
    """Give the parameters that modules of `model` have at the end the attributes of those that were there before."""
    before = {
        (module, name): dict(vars(param))
        for module in model.modules()
        for name, param in registered(module).items()
        if param is not None and vars(param)
    }
    yield
    for (module, name), attributes in before.items():
        if (param := registered(module).get(name)) is not None:
            vars(param).update(attributes)
