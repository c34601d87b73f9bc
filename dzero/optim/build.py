"""The optimizer a config names, with the usual two groups: matrices decay, vectors (norms, biases) do not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dzero.optim.adamw import AdamW
from dzero.optim.master import MasterOptimizer
from dzero.optim.muon import Muon, MuonConfig, check_muon, matrices_of, split_by_rule
from dzero.optim.scaler import ScalerConfig
from dzero.optim.torch_rule import TorchOptimizer, check_rule, mixes
from dzero.zero.layout import Layout
from dzero.zero.shard import Sharded

BETAS, EPS = (0.9, 0.95), 1e-8
OURS = ("adamw", "muon")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """`rule`: adamw; muon, for matrices, with adamw for the others; or the name of a class of torch.optim (SGD, ...)
    that runs over the fp32 masters.

    `betas`, `eps`: adamw's (unset: 0.9, 0.95 and 1e-8). `muon`: muon's own. `options`: another rule's keyword
    arguments, e.g. {momentum: 0.9}. `weight_decay`: of matrices. `max_norm`: clips the global gradient norm; null for
    no clipping.
    """

    rule: str = "adamw"
    lr: float = 3e-4
    weight_decay: float = 0.1
    max_norm: float | None = 1.0
    betas: list[float] | None = None
    eps: float | None = None
    muon: MuonConfig = field(default_factory=MuonConfig)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for key in ("lr", "weight_decay"):
            if not 0 <= getattr(self, key) < math.inf:
                raise ValueError(f"optim.{key}={getattr(self, key)}: must be a number ≥ 0")
        if self.betas is not None and not (len(self.betas) == 2 and all(0 <= b < 1 for b in self.betas)):
            raise ValueError(f"optim.betas={self.betas}: two numbers in [0, 1), e.g. [0.9, 0.95]")
        if self.eps is not None and not self.eps >= 0:
            raise ValueError(f"optim.eps={self.eps}: must be ≥ 0")
        if self.max_norm is not None and not self.max_norm > 0:
            raise ValueError(f"optim.max_norm={self.max_norm}: must be > 0, or null for no clipping")
        if self.rule != "muon" and self.muon != MuonConfig():
            raise ValueError(
                f"optim.muon has no effect with optim.rule={self.rule}; remove it, or take optim.rule=muon"
            )
        if self.rule in OURS:
            if self.options:
                raise ValueError(
                    f"optim.options={self.options} has no effect with optim.rule={self.rule}; set optim.betas and "
                    "optim.eps"
                )
            return
        classes = sorted(n for n, c in vars(torch.optim).items() if isinstance(c, type) and n != "Optimizer")
        if self.rule not in classes:
            raise ValueError(f"optim.rule={self.rule!r}: choose adamw, muon or one of torch.optim's {classes}")
        if self.betas is not None or self.eps is not None:
            raise ValueError(f"optim.betas and optim.eps belong to adamw; give {self.rule}'s own through optim.options")

    @property
    def moments(self) -> int:
        """Tensors of a parameter's size that the rule keeps for it, found by a step on one of three elements.

        muon's are adamw's: those of matrices are fewer, which a plan has room for."""
        if self.rule in OURS:
            return 2
        param = nn.Parameter(torch.zeros(3))
        optimizer = getattr(torch.optim, self.rule)([param], **{str(k): v for k, v in self.options.items()}, lr=self.lr)
        param.grad = torch.ones(3)
        optimizer.step(lambda: torch.zeros(()))
        states = [each for each in optimizer.state[param].values() if isinstance(each, torch.Tensor)]
        return sum(each.numel() == param.numel() for each in states)

    @property
    def _mixes(self) -> bool:
        """Whether the rule updates elements of a matrix by others of it."""
        return self.rule == "muon" if self.rule in OURS else mixes(getattr(torch.optim, self.rule))

    def check_whole(self, cuts: Mapping[str, int]) -> None:
        """Raises ValueError for a setting that cuts matrices into as many parts, where the rule needs whole ones."""
        for key, parts in cuts.items():
            if parts > 1 and self._mixes:
                raise ValueError(
                    f"{key}={parts} with optim.rule={self.rule}: it mixes elements of a matrix, and those that are cut "
                    f"along other axes or into tiles are not put together; take {key}=1, or optim.rule=adamw"
                )

    def check(self, layout: Layout) -> None:
        """Raises ValueError for a rule that the table's shards or dtypes do not fit."""
        if self.rule == "muon":
            check_muon(layout)
        elif self.rule != "adamw":
            check_rule(getattr(torch.optim, self.rule), layout)


def build_optimizer(sharded: Sharded, config: OptimConfig, scaler: ScalerConfig | None = None) -> MasterOptimizer:
    """The optimizer of `config` over `sharded`'s trained parameters. Raises ValueError as the optimizers do."""
    groups = decay_groups(sharded, config.weight_decay)
    own: dict[str, Any] = {
        "lr": config.lr,
        "betas": BETAS if config.betas is None else (config.betas[0], config.betas[1]),
        "eps": EPS if config.eps is None else config.eps,
    }
    if config.rule == "adamw":
        return AdamW(sharded, groups, max_norm=config.max_norm, scaler=scaler, **own)
    if config.rule == "muon":
        groups = split_by_rule(groups, matrices_of(sharded, config.muon.exclude))
        return Muon(sharded, groups, muon=config.muon, max_norm=config.max_norm, scaler=scaler, **own)
    rule = getattr(torch.optim, config.rule)
    options = {str(key): value for key, value in config.options.items()}
    return TorchOptimizer(sharded, rule, groups, max_norm=config.max_norm, scaler=scaler, lr=config.lr, **options)


def decay_groups(sharded: Sharded, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: those with two or more dims at `weight_decay`, the others at 0; empty groups left out."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    dims = {param.name: len(param.whole) for unit in sharded.shapes for param in unit.params}
    for name, param in sharded.named_params().items():
        if param.requires_grad:
            (matrices if dims[name] >= 2 else vectors).append(param)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
