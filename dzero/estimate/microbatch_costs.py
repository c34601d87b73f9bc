"""What one microbatch costs the rank that computes it, before anything is sharded: a run of the model on fake tensors.

    forward    unit by unit, between them what belongs to the root (norm, tied or small ends); the loss
    backward   the other way round, with what activation checkpointing computes again

A unit inside another, of experts that ranks share, is at work between two spans of the one around it.

While a unit is at work, `peak_bytes` is the most that lives besides the parameters: what earlier units keep for their
backward, its own temporaries, and whole gradients, of a unit until its backward has ended, of the root until the
model's has. Nothing is allocated, no value is computed; shapes, dtypes and operators are the real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dzero.comm.ledger import Ledger, Traffic
from dzero.estimate.operator_work import OperatorWork, work_of
from dzero.mesh import CONTEXT, EXPERT
from dzero.zero.dtensors import local_of
from dzero.zero.units import ROOT, find_units, unit_around

FORWARD, BACKWARD = "forward", "backward"
LOSS = "loss"
"""What comes after the model's output, as a unit of its own without parameters."""
Loss = Callable[[nn.Module], torch.Tensor]
"""Runs the model on one microbatch of its own making; a scalar."""


@dataclass(frozen=True)
class UnitSpan:
    """A unit at work in one direction. `saved_bytes`: what lives, gradients aside, when it has ended."""

    direction: str
    unit: str
    peak_bytes: int
    saved_bytes: int
    work: OperatorWork


@dataclass(frozen=True)
class MicrobatchCosts:
    """Of one microbatch, in the order of time. `beside`: ranks along axes that the table does not know, cp and ep."""

    spans: tuple[UnitSpan, ...]
    beside: Mapping[str, int] = field(default_factory=dict)

    def work(self, direction: str) -> OperatorWork:
        """In all; recomputation counts as backward."""
        return sum((span.work for span in self.spans if span.direction == direction), OperatorWork())


def costs_of(
    model: nn.Module,
    loss: Loss,
    units: Sequence[str] | None = None,
    *,
    ledger: Ledger | None = None,
    beside: Mapping[str, int] | None = None,
    experts: Mapping[str, nn.Module] | None = None,
) -> MicrobatchCosts:
    """Of `model`, on meta, in the dtype it computes in. units: class names, as `zero.units`. beside: ranks along cp and
    ep; ledger: in which attention and experts count what they move between them. experts: those that ranks share."""
    modules = dict(find_units(model, units, experts=experts))
    with FakeTensorMode(allow_non_fake_inputs=True), _Meter(ledger or Ledger()) as meter:
        with meter.unseen():
            model = model.to_empty(device="cpu")
            held = {param for module in (experts or {}).values() for param in module.parameters()}
            if any(isinstance(param, DTensor) for param in {*model.parameters()} - held):
                _rehearse(model, loss)
        owner = {param: name for name, each in modules.items() for module in each for param in module.parameters()}
        for name, module in (experts or {}).items():
            owner |= dict.fromkeys(module.parameters(), name)
        for name, each in modules.items():
            around = unit_around(name, [*modules, ROOT]) if name in (experts or {}) else ROOT
            for module in each:
                meter.follow(name, module, around)
        meter.follow(ROOT, model, around=LOSS)
        for param in model.parameters():
            if param.requires_grad:
                name = owner.get(param, ROOT)
                param.register_post_accumulate_grad_hook(partial(meter.hold, name))  # type: ignore[no-untyped-call]
        total = loss(model)
        meter.enter(BACKWARD, LOSS)
        total.backward()  # type: ignore[no-untyped-call]
        del total
        meter.close()
    return MicrobatchCosts(tuple(meter.spans), beside or {})


def _rehearse(model: nn.Module, loss: Loss) -> None:
    """DTensors run operators on whole shapes to learn where results lie, each once."""
    loss(model).backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages and operations, by the unit that is at work."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spans: list[UnitSpan] = []
        self._ledger = ledger
        self._live: dict[int, int] = {}
        self._bytes = self._peak = 0
        self._work = OperatorWork()
        self._at = (FORWARD, ROOT)
        self._seen = True
        self._grads: dict[str, list[nn.Parameter]] = {}
        self._around: dict[str, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it takes itself apart first
        out = func(*args, **(kwargs or {}))
        self._work += work_of(func, args, kwargs or {}, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._take(tensor.untyped_storage())
        return out

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live:
            return
        self._live[key] = count = storage.nbytes() if self._seen else 0
        self._bytes += count
        self._peak = max(self._peak, self._bytes)
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self._bytes -= self._live.pop(key)

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """What is made or done inside counts nowhere."""
        self._seen = False
        try:
            yield
        finally:
            self._seen, self._work = True, OperatorWork()
            self._ledger.take()

    def enter(self, direction: str, unit: str) -> None:
        """From now on that one is at work."""
        if (direction, unit) == self._at:
            return
        self.close(self._around.get(unit) == self._at[1])
        self._at = direction, unit

    def close(self, for_inner: bool = False) -> None:
        """The unit at work has ended, or waits for one inside it."""
        direction, unit = self._at
        if direction == BACKWARD and unit != ROOT and not for_inner:
            for param in self._grads.pop(unit, []):
                param.grad = None
        held = sum(local_of(p.grad).nbytes for params in self._grads.values() for p in params if p.grad is not None)
        moved = {CONTEXT: Traffic(), EXPERT: Traffic()}
        for entry, each in self._ledger.take().items():
            moved[entry.axis] += each
        passed, routed = moved.values()
        work = self._work + OperatorWork(
            passed=passed.sent_bytes, passes=passed.calls, routed=routed.sent_bytes, routes=routed.calls
        )
        self.spans.append(UnitSpan(direction, unit, self._peak, self._bytes - held, work))
        self._peak, self._work = self._bytes, OperatorWork()

    def leave(self, unit: str, around: str) -> None:
        """The backward of `unit` has ended, if no other has begun."""
        if self._at == (BACKWARD, unit):
            self.enter(BACKWARD, around)

    def hold(self, unit: str, param: nn.Parameter) -> None:
        """A parameter has got its gradient, which is reduced when the backward of its unit has ended."""
        if unit in (ROOT, self._at[1], self._around.get(self._at[1])):
            self._grads.setdefault(unit, []).append(param)
        else:
            param.grad = None

    def follow(self, unit: str, module: nn.Module, around: str = ROOT) -> None:
        """A module of the unit: its forward by hooks, its backward by the gradients of its outputs and inputs.

        A forward that is made again belongs to the backward of its unit; a unit inside has a span of its own there too.
        """
        if around not in (ROOT, LOSS):
            self._around[unit] = around

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._at[0] == BACKWARD and unit not in self._around:
                return
            self.enter(self._at[0], unit)
            for tensor in tree_leaves((args, kwargs)):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.leave(unit, around))  # type: ignore[no-untyped-call]

        def after(_: nn.Module, args: Any, out: Any) -> None:
            if self._at[0] == BACKWARD and unit not in self._around:
                return
            for tensor in tree_leaves(out):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda _: self.enter(BACKWARD, unit))  # type: ignore[no-untyped-call]
            self.enter(self._at[0], around)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
