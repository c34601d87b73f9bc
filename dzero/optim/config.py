"""Settings of the update rule, without an import of torch: `optim/build.py` checks options of torch.optim rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from dzero.compatibility import check_compatible
from dzero.utils.ranges import BELOW_1, check, number, positive, whole
from dzero.utils.rules import Settings

SCALES = ("rms", "original")
BETAS, EPS = (0.9, 0.95), 1e-8
OURS = ("adamw", "muon")
MOST_NORM, MOST_RATE, MOST_ITERATIONS = 1e18, 1e6, 1000


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Settings of Muon for its matrices."""

    lr: float | None = None
    """Learning rate of matrices. null: optim.lr, which fits scale=rms."""
    momentum: float = 0.95
    """Decay rate of the average of gradients, in [0, 1)."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    iterations: int = 5
    """Number of Newton-Schulz iterations."""
    scale: str = "rms"
    """Scaling of an update by the shape of its matrix: rms or original."""
    compute: str = "auto"
    """Dtype in which matrices are orthogonalized: fp32, bf16, or auto (bf16 for bf16 parameters, else fp32)."""
    exclude: list[str] = field(default_factory=lambda: ["head", "lm_head"])
    """Names of modules, at any level of a path, whose matrices use AdamW. Embeddings always use AdamW."""

    def __post_init__(self) -> None:
        rate = number(MOST_RATE, or_null="for optim.lr")
        check("optim.muon", self, lr=rate, momentum=BELOW_1, iterations=whole(1, MOST_ITERATIONS))
        if self.scale not in SCALES:
            raise ValueError(f"optim.muon.scale={self.scale!r}: choose one of {list(SCALES)}")
        if self.compute not in ("auto", "fp32", "bf16"):
            raise ValueError(f"optim.muon.compute={self.compute!r}: choose auto, fp32 or bf16")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The update rule and its settings."""

    rule: str = "adamw"
    """Update rule: adamw, muon (matrices; the rest uses adamw), or a class of torch.optim such as SGD or Adafactor."""
    lr: float = 3e-4
    """Learning rate at the peak of the schedule."""
    weight_decay: float = 0.1
    """Weight decay of matrices. Vectors have none."""
    max_norm: float | None = 1.0
    """Global gradient norm above which gradients are clipped. null: no clipping."""
    betas: list[float] | None = None
    """Betas of adamw. null: [0.9, 0.95]."""
    eps: float | None = None
    """Epsilon of adamw. null: 1e-8."""
    muon: MuonConfig = field(default_factory=MuonConfig)
    """Settings of muon."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of a torch.optim rule, such as {momentum: 0.9}."""

    def __post_init__(self) -> None:
        clip = positive(MOST_NORM, or_null="for no clipping")
        check("optim", self, lr=number(MOST_RATE), weight_decay=number(MOST_RATE), eps=number(1.0), max_norm=clip)
        numbers = {key: value for key, value in self.options.items() if isinstance(value, float)}
        if unfit := {key: value for key, value in numbers.items() if not math.isfinite(value)}:
            raise ValueError(f"optim.options={unfit}: must be finite numbers")
        if self.betas is not None and not (len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)):
            raise ValueError(f"optim.betas={self.betas}: two numbers in [0, 1), e.g. [0.9, 0.95]")
        check_compatible(Settings.of(optim=self))
