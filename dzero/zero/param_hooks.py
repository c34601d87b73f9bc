"""Gradient hooks that users register on parameters before `shard`, which still run.

    attached by                             after `shard`
    register_hook                           called with this rank's whole gradient, per backward, before it is reduced
    register_post_accumulate_grad_hook      called with the whole parameter and its `.grad`, with one microbatch

Hooks are called as under DDP. One that is removed by its handle later is called no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.utils.torch_internals import hooks_of, registered
from dzero.zero import fsdp_internals as fsdp
from dzero.zero.layout import Layout
from dzero.zero.unit import Unit

Hooks = Mapping[int, Callable[[Any], Any]]


@dataclass(frozen=True)
class ParamHooks:
    """Hooks of the parameter at `attribute` of `module`, called `name`: the dicts that the user's handles edit."""

    name: str
    module: nn.Module
    attribute: str
    before: Hooks
    after: Hooks

    @classmethod
    def of_all(cls, model: nn.Module, layout: Layout) -> list[ParamHooks]:
        """Return the hooks of a model that is not sharded yet.

        Raises:
            ValueError: A hook would see another `.grad` than in torch.
        """
        hooks = []
        for prefix, module in model.named_modules():
            for attribute, param in registered(module).items():
                if param is None or not any(hooks_of(param)):
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                before, after = hooks_of(param)
                hooks.append(cls(name, module, attribute, before, after))
                if after and (layout.microbatches > 1 or layout.pipeline_ranks > 1):
                    raise ValueError(
                        f"{name} has a hook of register_post_accumulate_grad_hook, whose .grad would lack earlier "
                        "microbatches: take register_hook, which sees the gradient of each, or one microbatch per step"
                    )
        return hooks


def give_back(hooks: Iterable[ParamHooks], units: Iterable[Unit]) -> None:
    """Register on what is gathered of sharded parameters the hooks that their originals had; call this once."""
    held_of = {
        fsdp.shard_of(held): held
        for unit in units
        for group in fsdp.groups_of(unit.modules[0])
        for held in fsdp.trained_params(group)
    }
    hooked = set()
    for each in hooks:
        param = registered(each.module).get(each.attribute)
        if param in held_of and param not in hooked:
            hooked.add(param)
            fsdp.wrap_unsharded(held_of[param], partial(_register, each))


def _register(hooks: ParamHooks, whole: nn.Parameter) -> None:
    if hooks.before:
        whole.register_hook(partial(_call, hooks.before))  # type: ignore[no-untyped-call]
    if hooks.after:
        whole.register_post_accumulate_grad_hook(partial(_call_after, hooks.after))  # type: ignore[no-untyped-call]


def _call(hooks: Hooks, grad: torch.Tensor) -> torch.Tensor:
    """Run hooks in order on a gradient, which keeps its dtype: that of the parameter may be lower than the user's."""
    for hook in [*hooks.values()]:
        if (changed := hook(grad)) is not None:
            grad = changed.to(grad.dtype)
    return grad


def _call_after(hooks: Hooks, whole: nn.Parameter) -> None:
    for hook in [*hooks.values()]:
        hook(whole)
