"""Outside of forward and backward a model's parameters are its shards, also where units stay gathered in between.

FSDP2 leaves the gathered parameters on the modules of stages 1 and 2 until a backward ends, after all but the last
microbatch, and after an evaluation, which has no backward. Whoever then edits, freezes or clips `model.parameters()`
would do that to copies. So the shards are put back, and the gathered ones, unless a shard was written since, before the
next forward. There too they learn whether their shards were frozen meanwhile. This needs what FSDP2 keeps to itself.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.zero.late import groups_of
from dzero.zero.unit import Unit, as_module


def follow_shards(units: list[Unit], roots: list[nn.Module], *, stays_gathered: bool) -> None:
    """Give every unit a hook before its forward, and the roots one after an evaluation's; called once.

    stays_gathered: whether units may be gathered after forward.
    """
    for unit in units:
        groups = groups_of(unit.modules[0])
        for module in map(as_module, unit.modules):
            module.register_forward_pre_hook(partial(_before_forward, unit, groups), prepend=True)
            if stays_gathered and any(module is root for root in roots):
                module.register_forward_hook(partial(_after_forward, unit, units))


def put_shards(units: list[Unit]) -> None:
    """Register the shards of every unit that is gathered."""
    for unit in units:
        for group in groups_of(unit.modules[0]):
            if group.is_unsharded:
                for held in group.fsdp_params:
                    held._setattr_on_modules(held.sharded_param)


def drop_waiting(units: list[Unit], names: Container[str]) -> None:
    """Forget whole gradients of `names` that wait for the last microbatch's, to be reduced with them."""
    for unit in units:
        waiting = [held for group in groups_of(unit.modules[0]) for held in group.fsdp_params if _waits(held)]
        name_of = {param: name for name, param in unit.params.items()} if waiting else {}
        for held in waiting:
            if name_of.get(held.sharded_param) in names:
                held.unsharded_accumulated_grad = None
                if (param := held.__dict__.get("_unsharded_param")) is not None:
                    param.grad = None


def _waits(held: Any) -> bool:
    param = held.__dict__.get("_unsharded_param")
    return held.unsharded_accumulated_grad is not None or (param is not None and param.grad is not None)


def _after_forward(root: Unit, units: list[Unit], *_: object) -> None:
    if torch.is_grad_enabled():
        root.awaits_backward = True
    elif not root.awaits_backward:
        put_shards(units)


def _before_forward(unit: Unit, groups: list[Any], *_: object) -> None:
    for group in groups:
        for held in group.fsdp_params:
            param = held.__dict__.get("_unsharded_param")
            if param is not None and param.requires_grad != held.sharded_param.requires_grad:
                param.requires_grad_(held.sharded_param.requires_grad)
        if group.is_unsharded and unit.is_stale:
            group.reshard()
        elif group.is_unsharded:
            for held in group.fsdp_params:
                held._setattr_on_modules(held.unsharded_param)
    unit.is_stale = False
