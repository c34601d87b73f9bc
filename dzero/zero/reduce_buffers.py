"""Reduction of all trained parameters of a unit in one buffer, whether or not they have gradients on this rank.

FSDP2 leaves out parameters without a gradient. If ranks use different modules of a unit, they would then add gradients
of different parameters, or wait for data of another size. Here, a missing gradient is reduced as zeros. The consumer of
the buffer gets the names of these parameters, and decides whether to set `.grad`, a view of the buffer. This module
uses private attributes of FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dzero.zero.deferred_grads import groups_of, unreduced
from dzero.zero.scalar_params import widen_gradient
from dzero.zero.unit import GradConsumer, Unit


def reduce_whole(unit: Unit) -> None:
    """Make FSDP2 reduce all trained parameters of `unit` together; call this once, before its first forward."""
    groups = [_Whole(unit, group) for group in groups_of(unit.modules[0])]
    unit.buffered = tuple(name for group in groups for name in group.names)


class _Whole:
    """Wrapper of a parameter group's `post_backward`, which FSDP2 calls per use and at the end of each backward."""

    def __init__(self, unit: Unit, group: Any) -> None:
        name_of = {param: name for name, param in unit.params.items()}
        self._unit, self._group = unit, group
        self._consumer: GradConsumer | None = None
        self._held = [held for held in group.fsdp_params if held.sharded_param.requires_grad]
        self.names = [name_of[held.sharded_param] for held in self._held]
        self._scalars = [held for held in self._held if not held._orig_size]
        self._run, group.post_backward = group.post_backward, self
        for held, name in zip(self._held, self.names, strict=True):
            held.to_sharded_dtensor = partial(self._as_grad, name, unit.params[name], held.to_sharded_dtensor)

    def __call__(self, *unused: Any) -> None:
        if not self._group.reduce_grads and "_unsharded_param" not in self._group.fsdp_params[0].__dict__:
            return  # never gathered so far; FSDP2 would fail on the missing unsharded parameter
        missing = self._fill() if self._group.reduce_grads else []
        for held in self._scalars if self._group.reduce_grads else ():
            widen_gradient(held)
        self._unit.expect(frozenset(missing))
        without = [param for name in missing if (param := self._unit.params[name]).grad is None]
        self._consumer, layout = self._unit.attached, self._unit.layout
        # FSDP2 casts the reduced buffer to this dtype for `.grad`. Our optimizers take it in the layout's dtype.
        self._group._orig_dtype = layout.param.dtype if self._consumer is None else layout.grad.dtype
        self._run(*unused)
        self._unit.delivered()
        for param in without if self._consumer is None else ():
            param.grad = None
        self._consumer = None

    def _as_grad(
        self, name: str, param: nn.Parameter, make: Callable[[torch.Tensor], DTensor], piece: torch.Tensor
    ) -> DTensor:
        """Replace FSDP2's `to_sharded_dtensor`, which makes `.grad` from a part of the reduced buffer."""
        param.grad_dtype = None  # allows a gradient in the layout's dtype, whatever the parameter's is
        shown = None if self._consumer is None else self._consumer.shown(name, piece)
        return make(piece) if shown is None else shown

    def _fill(self) -> list[str]:
        """Set missing gradients to zeros, if other parameters have one, and return the names of the missing."""
        found = unreduced(self._held)
        if not found or len(found) == len(self._held):
            return []
        missing = [index for index, held in enumerate(self._held) if held not in found]
        waiting = any(held.unsharded_accumulated_grad is not None for held in self._held)
        for held in self._held if waiting else ():  # FSDP2 accumulates over microbatches in the reduction's dtype
            held.to_accumulated_grad_if_needed()
        for index in missing:
            held = self._held[index]
            if waiting:
                held.unsharded_accumulated_grad = torch.zeros_like(held._unsharded_param, dtype=held.reduce_dtype)
            else:
                held._unsharded_param.grad = torch.zeros_like(held._unsharded_param)
        return [self.names[index] for index in missing]
