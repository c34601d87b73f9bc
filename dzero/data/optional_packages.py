"""Optional packages, imported where they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any


def require(module: str, purpose: str) -> Any:
    """Import a package of the extra `data`.

    Args:
        module: Name of the module.
        purpose: What needs the package, for the message.

    Raises:
        ModuleNotFoundError: If the package is not installed. The message names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise ModuleNotFoundError(
            f"{purpose} needs the package {package}: pip install 'dzero[data]'", name=error.name
        ) from error
