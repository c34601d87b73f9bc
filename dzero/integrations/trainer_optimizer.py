"""The optimizer that a user of Trainer asks for, over shards.

Trainer, a subclass or the user makes an optimizer of torch, which has no states before its first step. The one over
shards has its class, groups and settings: `dzero.AdamW` for torch's AdamW, else `dzero.TorchOptimizer`. An optimizer
that was made before the model was sharded holds parameters that no longer exist; their names lead to the shards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dzero.optim.adamw import AdamW
from dzero.optim.base import MasterOptimizer
from dzero.optim.group_settings import KERNELS
from dzero.optim.requires_unsharded import ELEMENTWISE, PARAMETERWISE, UNKNOWN, needs_of
from dzero.optim.torch_optimizer import TorchOptimizer
from dzero.zero.sharded import Sharded

ADAMW_ONLY = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}
"""Further settings of torch's AdamW, at the only values that dzero's has."""


UNSET = object()


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer by names of parameters.

    Attributes:
        rule: Class of the optimizer.
        groups: Its parameter groups, with names in place of parameters.
        settings: Arguments of the class, for groups that do not say otherwise.
    """

    rule: type[torch.optim.Optimizer]
    groups: list[dict[str, Any]]
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerRecipe:
        """Return the recipe of an optimizer over `model`.

        Raises:
            ValueError: The optimizer has taken steps, or holds parameters of another model.
        """
        if any(float(state.get("step", 1)) for state in optimizer.state.values()):
            raise ValueError(
                f"{type(optimizer).__name__} has taken steps, whose states shards would not get: pass a new optimizer"
            )
        names = {param: name for name, param in model.named_parameters()}
        groups = []
        for group in optimizer.param_groups:
            if any(param not in names for param in group["params"]):
                raise ValueError(
                    f"{type(optimizer).__name__} holds a parameter that is not the model's: build its groups from "
                    "model.named_parameters(), and change no parameter afterwards"
                )
            named = [names[param] for param in group["params"] if param.requires_grad]
            own = {key: value for key, value in group.items() if key not in KERNELS}
            groups.append({key: value for key, value in own.items() if value != optimizer.defaults.get(key, UNSET)})
            groups[-1]["params"] = named
        known = inspect.signature(type(optimizer)).parameters.keys() - {*KERNELS}
        settings = {key: value for key, value in optimizer.defaults.items() if key in known}
        return cls(type(optimizer), [group for group in groups if group["params"]], settings)

    def make(self, sharded: Sharded) -> MasterOptimizer:
        """Create the optimizer over shards.

        Raises:
            ValueError: dzero has no such optimizer.
        """
        params = dict(sharded.model.named_parameters())
        groups = [{**group, "params": [params[name] for name in group["params"]]} for group in self.groups]
        if self.rule is not torch.optim.AdamW:
            if needs_of(self.rule) == UNKNOWN and sharded.layout.stage:
                known = ", ".join((*ELEMENTWISE, *PARAMETERWISE))
                raise ValueError(
                    f"{self.rule.__name__} may update an element from others, of which each rank has a part: take "
                    f"adamw_torch or another class of torch.optim ({known}), or dzero={{'stage': 0}}"
                )
            return TorchOptimizer(sharded, self.rule, groups, **self.settings)
        settings = dict(self.settings)
        for given in (settings, *groups):
            for key, only in ADAMW_ONLY.items():
                if given.pop(key, only) is not only:
                    raise ValueError(f"AdamW with {key}={not only}: dzero.AdamW has {key}={only}; leave it away")
        return AdamW(sharded, groups, **settings)


class Skips:
    """Answer to accelerate, which asks an optimizer whether its last step was skipped, as after an fp16 overflow."""

    def __init__(self, optim: MasterOptimizer) -> None:
        self._optim = optim

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing."""
        return self._optim.consecutive_skips > 0
