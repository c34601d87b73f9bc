"""Import of modules with Triton kernels, which CPU builds of torch lack, by name."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def triton_module(name: str) -> Any:
    """Import a module of Triton kernels.

    Raises:
        ModuleNotFoundError: Triton cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"kernels on CUDA need triton, which cannot be imported ({error}): CUDA builds of torch bring it, "
            "or install the version that your torch names with `pip install triton`"
        ) from error
