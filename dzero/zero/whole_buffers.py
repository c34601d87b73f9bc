"""A unit's reduced buffer holds all of its trained parameters, whichever of them got gradients on this rank.

FSDP2 leaves out those that got none, so ranks that ran other modules of a unit would add gradients of different
parameters to each other, or wait for data of another size. Here zeros stand for what is missing; who takes the buffer
is told which those are, and whether `.grad` is set. This needs what FSDP2 keeps to itself.
"""

from __future__ import annotations

from typing import Any

import torch

from dzero.zero.late import groups_of
from dzero.zero.scalars import widen_gradient
from dzero.zero.unit import Unit


def reduce_whole(unit: Unit) -> None:
    """Let FSDP2 reduce all trained parameters of `unit` together; called once, before its first forward."""
    groups = [_Whole(unit, group) for group in groups_of(unit.modules[0])]
    unit.buffered = tuple(name for group in groups for name in group.names)


class _Whole:
    """FSDP2's `post_backward` of a group of parameters, called for each use and at the end of each backward."""

    def __init__(self, unit: Unit, group: Any) -> None:
        name_of = {param: name for name, param in unit.params.items()}
        self._unit, self._group = unit, group
        self._held = [held for held in group.fsdp_params if held.sharded_param.requires_grad]
        self.names = [name_of[held.sharded_param] for held in self._held]
        self._scalars = [held for held in self._held if not held._orig_size]
        self._run, group.post_backward = group.post_backward, self

    def __call__(self, *unused: Any) -> None:
        missing = self._fill() if self._group.reduce_grads else []
        for held in self._scalars if self._group.reduce_grads else ():
            widen_gradient(held)
        self._unit.expect(frozenset(missing))
        params = [self._unit.params[name] for name in missing]
        without = [param for param in params if param.grad is None]
        self._run(*unused)
        if self._unit.is_attached:
            self._unit.delivered()
        else:
            for param in without:
                param.grad = None

    def _fill(self) -> list[str]:
        """Give zeros to the parameters without gradient, where others have one; return their names."""
        missing = [index for index, held in enumerate(self._held) if not _has_gradient(held)]
        if not missing or len(missing) == len(self._held):
            return []
        waiting = any(held.unsharded_accumulated_grad is not None for held in self._held)
        for held in self._held if waiting else ():  # FSDP2 keeps those of earlier microbatches in the reduced dtype
            held.to_accumulated_grad_if_needed()
        for index in missing:
            held = self._held[index]
            if waiting:
                held.unsharded_accumulated_grad = torch.zeros_like(held._unsharded_param, dtype=held.reduce_dtype)
            else:
                held._unsharded_param.grad = torch.zeros_like(held._unsharded_param)
        return [self.names[index] for index in missing]


def _has_gradient(held: Any) -> bool:
    param = getattr(held, "_unsharded_param", None)
    return held.unsharded_accumulated_grad is not None or (param is not None and param.grad is not None)
