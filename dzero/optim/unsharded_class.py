"""Updates by a `torch.optim` class that mixes the elements of a parameter: the class sees whole parameters only.

On the rank that owns a parameter, a stand-in takes the parameter's place in the class. It holds the whole fp32 master
during an update, and no memory between updates. The class keeps its states for the stand-in, so each state exists on
one rank and is not sharded. At stage 0, where nothing is sharded, every rank owns every parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dzero.optim.class_step import ClassStep
from dzero.optim.master_param import MasterParam
from dzero.optim.offloaded_step import PendingUpdate, device_of
from dzero.zero.unit_shapes import ParamShape

INPUTS, PAYLOAD = 2, torch.float32
"""An owner needs the gradient and the master of a parameter, and returns the new master."""


def cost_of(shape: ParamShape) -> int:
    """Return the elements of a parameter, so that owners have states for as many."""
    return shape.elems


def stand_in(shape: Sequence[int], device: torch.device) -> nn.Parameter:
    """Return a parameter of a shape that takes memory for one element."""
    return nn.Parameter(torch.zeros((), device=device).expand(*shape))


def update_whole(step: ClassStep, target: nn.Parameter, grad: torch.Tensor, master: torch.Tensor) -> None:
    """Update a whole master in place from its gradient, by the class that knows its stand-in `target`."""
    empty = target.data
    target.data, target.grad = master, grad
    try:
        step.run()  # skips stand-ins without gradient
    finally:
        target.data, target.grad = empty, None


@dataclass
class ClassUpdate:
    """The update of a step's parameters by a class, an `UnshardedRule`.

    Attributes:
        step: The step of the class, which has the stand-ins of the parameters that this rank owns.
        pending: Updates by parameter name.
        factor: Factor of the gradients: unscaling and clipping.
    """

    step: ClassStep
    pending: Mapping[str, PendingUpdate[MasterParam]]
    factor: float

    @property
    def device(self) -> torch.device:
        """Device of the masters."""
        return device_of(next(iter(self.pending.values())).stored)

    def prepare(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        """Fill in this rank's shards of the gradient and the master."""
        each = self.pending[name]
        each.stored.follow_edits()
        inputs[0].copy_(each.grad.float().mul(self.factor).view(-1))
        inputs[1].copy_(each.stored.master.detach().view(-1))

    def update(self, name: str, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the new master of a whole parameter."""
        grad, master = inputs
        target = self.pending[name].stored.target
        assert target is not None
        with self.step.in_use:
            update_whole(self.step, target, grad, master)
        return master

    def apply(self, name: str, result: torch.Tensor) -> None:
        """Store this rank's shard of the new master, and round it into the working copy."""
        held = self.pending[name].stored
        held.master.data.view(-1).copy_(result)
        held.write_back()
