"""What an import reads of a folder of DeepSpeed: tensors by name of the parameter, and values that are not tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dzero.models.tensor_views import Readable

MASTER_FILE, MOMENTS = "fp32", ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Named:
    """A tensor of the parameter or buffer `name`, stored flat or in `shape`; see `models.tensor_views.Readable`."""

    name: str
    part: Readable
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if math.prod(self.part.shape) != math.prod(self.shape):
            raise ValueError(f"{self.where} is {list(self.part.shape)}, {self.name} is {list(self.shape)}")

    @property
    def stored(self) -> tuple[str, ...]:
        """Name of the parameter or buffer."""
        return (self.name,)

    @property
    def where(self) -> str:
        """Place that an error message names."""
        return self.part.where

    def __call__(self) -> Tensor:
        """Read the whole tensor, on the CPU."""
        return self.part().view(self.shape)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the elements [offset, offset + size) along every dim, as a CPU tensor."""
        if self.part.shape == self.shape:
            return self.part.read(offset, size)
        return self()[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


@dataclass(frozen=True)
class InModel:
    """A parameter of the model that will resume, in memory; see `models.tensor_views.Readable`."""

    name: str
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def stored(self) -> tuple[str, ...]:
        """Name of the parameter."""
        return (self.name,)

    @property
    def where(self) -> str:
        """Place that an error message names."""
        return f"{self.name} of the model"

    def __call__(self) -> Tensor:
        """Return the whole tensor, on the CPU."""
        return self.tensor.detach().cpu()

    def read(self, offset: Sequence[int], size: Sequence[int]) -> Tensor:
        """Return the elements [offset, offset + size) along every dim, as a CPU tensor."""
        return self()[tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))]


@dataclass(frozen=True)
class DeepSpeedStates:
    """States in a folder of DeepSpeed.

    Attributes:
        where: The folder, for messages.
        masters: Values of trained parameters.
        moments: Moments of trained parameters, by key; none in a folder of weights alone.
        others: Frozen parameters and buffers.
        buffers: Names of those that are buffers.
        dtypes: Dtypes of frozen parameters and buffers.
        step: Steps of the run.
        updates: Updates of each parameter, which correct the bias of moments; 0 without moments.
        skipped: Steps of the run that updated nothing.
        scale: Dynamic loss scale of fp16; None without one.
        omits_frozen: Whether frozen parameters were left out, as transformers saves a model of peft.
        groups: Settings of parameter groups, and the names of their parameters in `params`.
        told: Other plain values, for the checkpoint's `extra`.
    """

    where: str
    masters: dict[str, Readable]
    moments: dict[str, dict[str, Readable]]
    others: dict[str, Readable]
    buffers: frozenset[str] = frozenset()
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    step: int = 0
    updates: int = 0
    skipped: int = 0
    scale: float | None = None
    omits_frozen: bool = False
    groups: list[dict[str, Any]] = field(default_factory=list)
    told: dict[str, Any] = field(default_factory=dict)
