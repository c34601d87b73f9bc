"""Assumptions of the ZeRO papers, read from `papers.toml`: model shapes, bytes per parameter, batches, hardware."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from dzero.zero.unit_shapes import ParamShape, UnitShape

PARAMS_PER_BLOCK = 12
"""Factor of hidden^2: 3 + 1 for attention, 4 + 4 for the MLP (ZeRO-Infinity, eq. 1)."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Stack of `layers` transformer blocks with `hidden` features, without embeddings."""

    layers: int
    hidden: int

    @classmethod
    def of(cls, elems: int, hidden: int) -> Shape:
        """Return the shape whose depth comes closest to `elems` parameters."""
        return cls(layers=max(1, round(elems / (PARAMS_PER_BLOCK * hidden**2))), hidden=hidden)

    @property
    def elems(self) -> int:
        """Number of parameters: 12 layers hidden^2."""
        return PARAMS_PER_BLOCK * self.layers * self.hidden**2

    def units(self, tiles: int = 1) -> list[UnitShape]:
        """Return the units, which are blocks, or with tiles the attention and each tile of the MLP."""
        h, rows = self.hidden, 4 * self.hidden // tiles
        attention = (ParamShape("qkv", (3 * h, h), True), ParamShape("out", (h, h), True))
        mlp = (ParamShape("up", (rows, h), True), ParamShape("down", (h, rows), True))
        block = [(*attention, *mlp)] if tiles == 1 else [attention, *[mlp] * tiles]
        return [UnitShape("block", params) for params in block] * self.layers


@dataclass(frozen=True, kw_only=True)
class SizedModel:
    """Model that a paper names by its size."""

    name: str
    elems: int
    hidden: int

    @property
    def shape(self) -> Shape:
        """Layers and hidden size."""
        return Shape.of(self.elems, self.hidden)


@dataclass(frozen=True, kw_only=True)
class ShardedModel(SizedModel):
    """Model on a number of nodes, with `batch` sequences per device."""

    nodes: int
    batch: float


@dataclass(frozen=True, kw_only=True)
class RunModel:
    """Model that a paper ran: its shape, and sequences per device."""

    name: str
    layers: int
    hidden: int
    batch: float

    @property
    def shape(self) -> Shape:
        """Layers and hidden size."""
        return Shape(layers=self.layers, hidden=self.hidden)


@dataclass(frozen=True, kw_only=True)
class System:
    """Training system, with the bytes per parameter that it keeps on the device."""

    name: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Zero:
    """Assumptions of ZeRO's table 1; `bytes` per parameter by kind of state, `stages` by the paper's names."""

    source: str
    bytes: dict[str, int]
    ranks: list[int]
    stages: dict[str, int]
    models: list[SizedModel]


@dataclass(frozen=True, kw_only=True)
class ZeroOffload:
    """Assumptions behind the largest model on one device."""

    source: str
    device_bytes: int
    sequence_tokens: int
    head_features: int
    systems: list[System]
    models: list[RunModel]


@dataclass(frozen=True, kw_only=True)
class Infinity:
    """Assumptions of ZeRO-Infinity's section 3, and its node; `bytes` per parameter."""

    source: str
    bytes: int
    sequence_tokens: int
    head_features: int
    tiles: int
    devices_per_node: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    models: list[ShardedModel]


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Assumptions of ZeRO-Infinity's section 4."""

    source: str
    achievable_flops: float
    sequence_tokens: int
    flops_per_elem_and_token: int
    param_bytes: int
    optimizer_bytes: int
    checkpoint_bytes_per_feature: int
    batches: list[float]
    hidden: list[int]
    targets: list[float]

    def param_intensity(self, batch: float) -> float:
        """Return the FLOP per byte of parameters and gradients moved (eq. 9: sequence x batch)."""
        return self.flops_per_elem_and_token * batch * self.sequence_tokens / self.param_bytes

    def optimizer_intensity(self, batch: float) -> float:
        """Return the FLOP per byte of optimizer states moved (eq. 10: sequence x batch / 4)."""
        return self.flops_per_elem_and_token * batch * self.sequence_tokens / self.optimizer_bytes

    def checkpoint_intensity(self, hidden: int) -> float:
        """Return the FLOP per byte of activation checkpoints moved, one per block (eq. 11: 24 x hidden)."""
        return self.flops_per_elem_and_token * PARAMS_PER_BLOCK * hidden / self.checkpoint_bytes_per_feature


@dataclass(frozen=True, kw_only=True)
class Papers:
    """Contents of `papers.toml`."""

    zero: Zero
    offload: ZeroOffload
    infinity: Infinity
    efficiency: Efficiency


def read_papers() -> Papers:
    """Return the assumptions."""
    return msgspec.toml.decode(Path(__file__).with_name("papers.toml").read_bytes(), type=Papers)
