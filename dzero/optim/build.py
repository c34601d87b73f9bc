"""Construction of the configured optimizer, with weight decay for matrices but not for vectors (norms, biases)."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.compatibility import check_compatible
from dzero.errors import converting
from dzero.optim.adamw import AdamW
from dzero.optim.base import MasterOptimizer
from dzero.optim.config import BETAS, EPS, OURS, OptimConfig
from dzero.optim.element_states import element_states, tried_states
from dzero.optim.loss_scaler import ScalerConfig
from dzero.optim.muon import Muon, matrices_of, split_by_rule
from dzero.optim.owned_states import OwnedStates
from dzero.optim.requires_unsharded import ELEMENTS, PARAMETERS, needs_of
from dzero.optim.torch_optimizer import TorchOptimizer
from dzero.zero.layout import Layout, RuleStates
from dzero.zero.sharded import Sharded

UNFIT = {
    "LBFGS": "it runs a step's forward and backward many times, and takes no parameter groups",
    "SparseAdam": "it takes sparse gradients only, which cannot be reduced over ranks",
}
"""Classes of torch.optim that do not train a run, and why."""

TRIED_ELEMS = 3
"""Elements of the dummy parameter on which a rule is tried."""


def build_optimizer(sharded: Sharded, config: OptimConfig, scaler: ScalerConfig | None = None) -> MasterOptimizer:
    """Build the optimizer of a config over the trained parameters of a sharded model.

    Raises:
        ValueError: The rule rejects its options, or does not support the layout of the model.
    """
    check_options(config)
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
    """Return parameter groups: parameters with two or more dims at `weight_decay`, others at 0; none is empty."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    dims = {param.name: len(param.whole) for unit in sharded.shapes for param in unit.params}
    for name, param in sharded.named_params().items():
        if param.requires_grad:
            (matrices if dims[name] >= 2 else vectors).append(param)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def check_rule_name(config: OptimConfig) -> None:
    """Raise ValueError if `optim.rule` is neither adamw, muon nor a class of torch.optim."""
    every = {name for name, kind in vars(torch.optim).items() if isinstance(kind, type) and name != "Optimizer"}
    classes = sorted(every - UNFIT.keys())
    if config.rule not in (*OURS, *every):
        by_letters = {name.lower(): name for name in (*OURS, *classes)}
        close = difflib.get_close_matches(config.rule.lower(), by_letters, n=1)
        suggestion = f"; did you mean {by_letters[close[0]]}?" if close else ""
        raise ValueError(
            f"optim.rule={config.rule!r}: choose adamw, muon or one of torch.optim's {classes}{suggestion}"
        )


def check_layout(config: OptimConfig, layout: Layout, cuts: Mapping[str, int] | None = None) -> None:
    """Raise ValueError if the update rule does not support the shards or dtypes of a layout.

    Args:
        config: The update rule.
        layout: Layout of the model.
        cuts: Number of parts into which each further setting, by its key, cuts matrices.
    """
    needed = {"optim.rule": config.rule, "optim.needs": rule_needs(config)}
    check_compatible(layout.settings.having({**needed, **(cuts or {})}))


def rule_needs(config: OptimConfig) -> str:
    """Return what the update of an element depends on, as in `optim/requires_unsharded.py`."""
    if config.rule in OURS:
        return PARAMETERS if config.rule == "muon" else ELEMENTS
    return needs_of(getattr(torch.optim, config.rule))


def rule_states(config: OptimConfig) -> RuleStates | None:
    """Return the states of a parameter's shape that a class of torch.optim keeps, or None for the moments of AdamW.

    The class is tried on small parameters. Muon counts as AdamW, which is an upper bound for plans: Muon's matrices
    keep one moment.
    """
    if config.rule in OURS:
        return None
    return () if rule_needs(config) == PARAMETERS else element_states(lambda shape: [_tried(config, shape)])


def owned_states(config: OptimConfig) -> OwnedStates | None:
    """Return the states that the update rule keeps whole on the owner of each parameter, if it needs them whole."""
    if config.rule in OURS or rule_needs(config) != PARAMETERS:
        return None
    return OwnedStates(partial(_tried, config))


def check_options(config: OptimConfig) -> None:
    """Raise ValueError if the update rule rejects `optim.options`, or cannot make a step with them."""
    if config.rule in OURS:
        return
    check_rule_name(config)
    for key in ("lr", "weight_decay"):
        if key in config.options:
            raise ValueError(f"optim.options={config.options}: {key} is set by optim.{key}; remove it there")
    _tried(config, (TRIED_ELEMS,))


def _tried(config: OptimConfig, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the states of a dummy parameter after one step of a torch.optim rule, or raise ValueError."""
    if config.rule in UNFIT:
        raise ValueError(f"optim.rule={config.rule}: {UNFIT[config.rule]}; take another class of torch.optim")
    rule = getattr(torch.optim, config.rule)
    allowed = sorted(set(inspect.signature(rule).parameters) - {"params", "lr", "weight_decay"})
    what = f"optim.rule={config.rule}" + (f" with optim.options={config.options}" if config.options else "")
    # All exceptions are converted, because torch.optim does not document which ones wrong options raise.
    with converting(what, Exception, repair=f"{config.rule} takes {allowed}"):
        options = {str(key): value for key, value in config.options.items()}
        groups = [{"weight_decay": config.weight_decay}] * 2
        states, _ = tried_states(partial(rule, **options, lr=config.lr), groups, shape, closure=lambda: 0.0)
    return states
