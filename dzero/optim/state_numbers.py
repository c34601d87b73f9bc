"""States of a `torch.optim` class that are single numbers, in the JSON types of a checkpoint's manifest.

state                           in the manifest
tensor without dims, `step`     step: 3.0
Python number                   python.step: 3
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

PYTHON = "python."


def numbers_of(rule: str, states: Mapping[str, Any]) -> dict[str, float]:
    """Return the states of a parameter that are numbers.

    Raises:
        TypeError: A state is neither a number nor a tensor.
    """
    numbers = {}
    for key, value in states.items():
        if isinstance(value, (bool, int, float)):
            numbers[f"{PYTHON}{key}"] = value
        elif not isinstance(value, torch.Tensor):
            raise TypeError(
                f"{rule} keeps the state {key!r} as {type(value).__name__}, and checkpoints hold tensors and numbers: "
                "let the class keep each tensor under a key of its own"
            )
        elif value.ndim == 0:
            numbers[key] = float(value)
    return numbers


def numbers_from(scalars: Mapping[str, float]) -> dict[str, Any]:
    """Return the states that `numbers_of` was given."""
    return {
        key.removeprefix(PYTHON): value if key.startswith(PYTHON) else torch.tensor(value)
        for key, value in scalars.items()
    }
