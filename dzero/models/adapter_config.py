"""Settings of adapters, the config group `adapter`: small trained matrices beside the frozen weights of a model.

Names and defaults are those of peft's `LoraConfig`. A setting that has no effect with `kind=none` is an error.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dzero.compatibility import check_compatible
from dzero.utils.ranges import BELOW_1, check, positive, whole
from dzero.utils.rules import Settings

KINDS = ("none", "lora")
ALL_LINEAR = "all-linear"
MOST_RANK, MOST_ALPHA = 2**16, 1e6


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """Adapters that are trained in place of the model's own parameters."""

    kind: str = "none"
    """Kind of adapter: none (all parameters are trained), or lora (low-rank matrices beside linear layers)."""
    r: int = 8
    """Rank of the matrices."""
    lora_alpha: float = 8.0
    """Scale of what the matrices add: lora_alpha / r, with use_rslora lora_alpha / sqrt(r)."""
    lora_dropout: float = 0.0
    """Probability with which an element of an adapter's input is dropped in training."""
    target_modules: Any = None
    """Modules that get adapters: a list of last parts of their names, or all-linear (all linear layers except the
    output head). null: those that peft knows for the type of model."""
    exclude_modules: list[str] | None = None
    """Modules among target_modules that get none, by last parts of their names. null: no exceptions."""
    layers_to_transform: list[int] | None = None
    """Indices of the blocks that get adapters. null: all."""
    modules_to_save: list[str] | None = None
    """Modules that are trained whole beside the adapters and saved with them, by the ends of their names, such as
    embed_tokens and lm_head for new tokens. null: none."""
    use_rslora: bool = False
    """Divide lora_alpha by sqrt(r) rather than by r."""
    use_dora: bool = False
    """Also train the norm of each row of a weight (DoRA), which starts from that of the model's own weight."""
    rank_pattern: dict[str, int] = field(default_factory=dict)
    """Ranks other than r, by name of module, such as {q_proj: 16}."""
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    """Values other than lora_alpha, by name of module."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"adapter.kind={self.kind!r}: choose one of {[*KINDS]}")
        rank, alpha = whole(1, MOST_RANK), positive(MOST_ALPHA)
        check("adapter", self, r=rank, lora_alpha=alpha, lora_dropout=BELOW_1)
        targets = self.target_modules
        named = isinstance(targets, list) and targets and all(isinstance(name, str) for name in targets)
        if not (targets is None or targets == ALL_LINEAR or named):
            raise ValueError(
                f"adapter.target_modules={targets!r}: must be null, {ALL_LINEAR} or a list of names such as "
                "[q_proj,v_proj]"
            )
        for key, values, allowed in (
            ("rank_pattern", self.rank_pattern, rank),
            ("alpha_pattern", self.alpha_pattern, alpha),
        ):
            if unfit := {name: value for name, value in values.items() if value not in allowed}:
                raise ValueError(f"adapter.{key}={unfit}: each must be {allowed}")
        layers = self.layers_to_transform
        if layers is not None and (not layers or min(layers) < 0):
            raise ValueError(f"adapter.layers_to_transform={layers}: must be indices of blocks, the first is 0")
        check_compatible(Settings.of(adapter=self))
