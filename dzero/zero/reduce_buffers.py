"""Reduction of all trained parameters of a unit in one buffer, whether or not they have gradients on this rank.

FSDP2 leaves out parameters without a gradient. If ranks use different modules of a unit, they would then add
gradients of different parameters, or wait for data of another size. Here, a missing gradient is reduced as zeros. The
consumer of the buffer gets the names of these parameters, and decides whether to set `.grad`, a view of the buffer.
Without a consumer, as under an optimizer of torch, `.grad` of such a parameter is set where the buffer has anything,
which is other ranks' then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dzero.zero import fsdp_internals as fsdp
from dzero.zero.dtensors import local_of
from dzero.zero.unit import GradConsumer, Unit


def reduce_whole(unit: Unit) -> None:
    """Make FSDP2 reduce all trained parameters of `unit` together; call this once, before its first forward."""
    groups = [_Whole(unit, group) for group in fsdp.groups_of(unit.modules[0])]
    unit.buffered = tuple(name for group in groups for name in group.names)


class _Whole:
    """Wrapper of a parameter group's `post_backward`, which FSDP2 calls per use and at the end of each backward."""

    def __init__(self, unit: Unit, group: fsdp.FSDPParamGroup) -> None:
        name_of = {param: name for name, param in unit.params.items()}
        self._unit, self._group = unit, group
        self._consumer: GradConsumer | None = None
        self._held = fsdp.trained_params(group)
        self.names = [name_of[fsdp.shard_of(held)] for held in self._held]
        self._scalars = [held for held in self._held if fsdp.is_without_dims(held)]
        fsdp.wrap_step(group, "post_backward", self._reduce)
        for held, name in zip(self._held, self.names, strict=True):
            fsdp.wrap_grad(held, partial(self._as_grad, name, unit.params[name]))

    def _reduce(self, run: Callable[..., None], *unused: Any) -> None:
        is_last = fsdp.reduces(self._group)
        if not is_last and not fsdp.was_gathered(self._group):
            return  # FSDP2 would fail on the missing unsharded parameter
        missing = (
            [self.names[index] for index in fsdp.fill_missing(self._held, self._may_be_reached)] if is_last else []
        )
        for held in self._scalars if is_last else ():
            fsdp.widen_gradient(held)
        self._unit.note_missing(frozenset(missing))
        without = [param for name in missing if (param := self._unit.params[name]).grad is None]
        self._consumer, layout = self._unit.attached, self._unit.layout
        # Our optimizers take gradients in the layout's dtype.
        fsdp.set_grad_dtype(self._group, layout.param.dtype if self._consumer is None else layout.grad.dtype)
        run(*unused)
        self._unit.delivered()
        for param in without if self._consumer is None and layout.unused != "zeros" else ():
            if param.grad is not None and not local_of(param.grad).any():  # else other ranks reached it
                param.grad = None
        self._consumer = None

    def _may_be_reached(self) -> bool:
        """Return whether other ranks may reach parameters of the unit in this backward, which reached none here."""
        return self._unit.layout.unused == "union" and fsdp.came_through(self._unit.modules[0], self._group)

    def _as_grad(
        self, name: str, param: nn.Parameter, make: Callable[[torch.Tensor], DTensor], piece: torch.Tensor
    ) -> DTensor:
        """Replace FSDP2's `to_sharded_dtensor`, which makes `.grad` from a part of the reduced buffer."""
        param.grad_dtype = None  # allows a gradient in the layout's dtype, whatever the parameter's is
        shown = None if self._consumer is None else self._consumer.shown(name, piece)
        return make(piece) if shown is None else shown
