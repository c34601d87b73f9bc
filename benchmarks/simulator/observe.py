"""Observation of one step by the meter: bytes held at every moment, and actions in order.

The loop is the trainer's, for real and simulated runs alike: forward and backward of the microbatches, optimizer step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from dzero.comm import dtensor_traffic
from dzero.comm.collective_log import Collective
from dzero.comm.ledger import Entry, Traffic
from dzero.hardware import format_bytes
from dzero.offload.build_schedule import update_order
from dzero.optim.adamw import AdamW
from dzero.zero.sharded import Sharded
from dzero.zero.unit import as_module
from dzero.zero.unit_shapes import UnitShape
from simulator.storage_meter import StorageMeter, StorageMoment, Where

Loss = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Passes:
    """Forward and backward passes of a pipeline stage in a step.

    Attributes:
        order: "forward" or "backward", and the microbatch, in order of execution.
        forward: Returns the output of a microbatch.
        backward: Runs the backward of a microbatch from its output.
    """

    order: Sequence[tuple[str, int]]
    forward: Callable[[int], torch.Tensor]
    backward: Callable[[int, torch.Tensor], None]

    @classmethod
    def alone(cls, microbatches: int, loss: Loss) -> Passes:
        """Return the passes of a whole model: loss / microbatches and at once its backward, per microbatch."""
        return cls.each([loss] * microbatches)

    @classmethod
    def each(cls, losses: Sequence[Loss]) -> Passes:
        """Return the passes of a whole model with a loss for each microbatch."""
        count = len(losses)
        order = [(what, index) for index in range(count) for what in (FORWARD, BACKWARD)]
        return cls(order, lambda index: losses[index]() / count, lambda _, value: value.backward())  # type: ignore[no-untyped-call]


FORWARD, BACKWARD, DECIDE = "forward", "backward", "decide"


@dataclass(frozen=True)
class ObservedAction:
    """Action of a step in its `phase` (see `Where`), with the bytes that it sends if it is a collective.

    `what` is unshard, forward, backward, reduce, decide or update.
    """

    microbatch: int
    phase: str
    what: str
    unit: str
    collective: str = ""
    sent_bytes: int = 0

    def __str__(self) -> str:
        moved = f"  {self.collective} sends {format_bytes(self.sent_bytes)}" if self.collective else ""
        return f"{self.microbatch} {self.what:<9} {self.unit}{moved}"


@dataclass(frozen=True)
class Observed:
    """Step: bytes held after every operator, actions in order, and traffic by ledger entry."""

    moments: list[StorageMoment]
    actions: list[ObservedAction]
    traffic: dict[Entry, Traffic]

    @property
    def peak(self) -> StorageMoment:
        """First moment at which the most bytes are held."""
        return max(self.moments, key=lambda moment: moment.total)


def observe(
    sharded: Sharded,
    optim: AdamW,
    loss: Loss | Passes,
    meter: StorageMeter,
    left: Callable[[bool], None] = lambda _: None,
) -> Observed:
    """Observe the second of two steps, which finds the buffers that the first one leaves, as all later steps do.

    Args:
        sharded: The sharded model.
        optim: Its optimizer.
        loss: Returns the scalar loss of a microbatch, not yet divided by their number; or all passes.
        meter: The meter, already entered, as are all modes below it.
        left: Called before every unit's backward and at the end of backward, with whether the microbatch is the last.
    """
    observer = _Observer(sharded, optim, meter, left)
    passes = loss if isinstance(loss, Passes) else Passes.alone(sharded.layout.microbatches, loss)
    with observer.hooked(), _without_collections():
        observer.step(passes)
        sharded.ledger.take()
        observer.actions.clear()
        meter.begin()
        observer.step(passes)
    return Observed(meter.moments(), observer.actions, sharded.ledger.take())


def run_steps(sharded: Sharded, optim: AdamW, steps: Sequence[Passes], meter: StorageMeter) -> None:
    """Run steps of different passes one after the other, each after a `begin` of the meter."""
    observer = _Observer(sharded, optim, meter, lambda _: None)
    with observer.hooked(), _without_collections():
        for passes in steps:
            meter.begin()
            observer.step(passes)


def collective_of(entry: Entry) -> str:
    """Return the name of a ledger entry in actions."""
    return f"{entry.kind} over {entry.axis}"


def updates(units: Sequence[UnitShape], microbatch: int) -> list[ObservedAction]:
    """Return the updates of all units, after the last microbatch of the step."""
    return [ObservedAction(microbatch, "step", "update", unit.name) for unit in update_order(units)]


class _Observer:
    def __init__(self, sharded: Sharded, optim: AdamW, meter: StorageMeter, left: Callable[[bool], None]) -> None:
        self._sharded, self._optim, self._meter, self._left = sharded, optim, meter, left
        self._inside: list[str] = []
        self._microbatch = 0
        self.actions: list[ObservedAction] = []
        meter.claim("param", [*sharded.named_params().values(), *sharded.model.buffers()])
        for states in optim.state.values():
            for key, tensor in states.items():
                if key != "step":
                    meter.claim("master" if key in ("master", "remainder") else "moments", [tensor])

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Record the forward and backward of units, and the collectives of the ledger."""
        removable = []
        for unit in self._sharded.units:
            for module in map(as_module, unit.modules):
                enter, leave = (partial(each, unit.shape.name) for each in (self._enter, self._leave))
                removable.append(module.register_forward_pre_hook(enter, prepend=True))
                removable.append(module.register_forward_hook(leave, prepend=True))
        self._sharded.ledger.listener = self._moved
        try:
            yield
        finally:
            self._sharded.ledger.listener = None
            for each in removable:
                each.remove()

    def step(self, passes: Passes) -> None:
        """Run one step like the trainer."""
        values: dict[int, torch.Tensor] = {}
        for what, self._microbatch in passes.order:
            if what == FORWARD:
                self._go("forward", "", "activations")
                values[self._microbatch] = self._optim.scale_loss(passes.forward(self._microbatch))
                continue
            with self._sharded.microbatch(is_last=self._microbatch == self._sharded.layout.microbatches - 1):
                self._go("backward", "", "temporaries")
                passes.backward(self._microbatch, values.pop(self._microbatch))
                self._claim_grads()
        self._go("step", "", "temporaries")
        self._optim.step()
        self.actions += updates(self._sharded.shapes, self._microbatch)

    def _go(self, phase: str, unit: str, kind: str) -> None:
        self._meter.where, self._meter.kind = Where(self._microbatch, phase, unit), kind

    def _enter(self, unit: str, *_: object) -> None:
        self._inside.append(unit)
        self._go("forward", unit, "activations")
        self.actions.append(self._action("forward", unit))

    def _leave(self, unit: str, _module: nn.Module, _args: object, output: Any) -> None:
        self._inside.pop()
        self._go("forward", self._inside[-1] if self._inside else "", "activations")
        parts = output if isinstance(output, (list, tuple)) else [output]
        differentiable = [each for each in parts if isinstance(each, torch.Tensor) and each.requires_grad]
        if differentiable:
            differentiable[-1].register_hook(partial(self._begin_backward, unit))  # type: ignore[no-untyped-call]

    def _begin_backward(self, unit: str, _grad: torch.Tensor) -> None:
        self._claim_grads()
        self._go("backward", unit, "temporaries")
        self.actions.append(self._action("backward", unit))

    def _claim_grads(self) -> None:
        self._meter.claim("grad", self._optim.gradients.on_device())
        self._left(self._sharded.is_last)

    def _moved(self, entry: Entry, sent_bytes: int) -> None:
        if entry.phase == dtensor_traffic.PHASE:
            return  # traffic of the model's own forward and backward
        begun = self._sharded.ledger.collective_log.step[-1]
        assert isinstance(begun, Collective)
        unit = begun.unit
        what = DECIDE if entry.phase == "control" else entry.phase
        self.actions.append(self._action(what, unit, collective_of(entry), sent_bytes))

    def _action(self, what: str, unit: str, collective: str = "", sent_bytes: int = 0) -> ObservedAction:
        return ObservedAction(self._microbatch, self._meter.where.phase, what, unit, collective, sent_bytes)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection, so that cycles are freed at the end and not at an arbitrary moment."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
