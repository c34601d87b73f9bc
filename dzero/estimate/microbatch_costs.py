"""Costs of one microbatch on the rank that computes it, before sharding, from a run of the model on fake tensors.

    forward    unit by unit, with spans of the root (norm, tied or small ends) between them; then the loss
    backward   in reverse order, including what activation checkpointing recomputes

An expert unit inside another unit runs between two spans of the unit around it.

`peak_bytes` is the maximum of live bytes while a unit runs, parameters excluded. It includes the activations that
earlier units save for backward, the unit's temporaries, and unreduced gradients. A unit's gradients are alive until its
backward has ended, and the root's until the model's backward has ended. Nothing is allocated and no value is computed,
but shapes, dtypes and operators are the real ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dzero.comm.ledger import Ledger, Traffic
from dzero.estimate.operator_work import GROUPED, OperatorWork, work_of
from dzero.mesh import CONTEXT, EXPERT
from dzero.utils.torch_internals import fake_tensors, intercept, storage_key, tree_leaves
from dzero.zero.dtensors import local_of
from dzero.zero.units import BLOCKS_AND_ENDS, ROOT, UnitChoice, find_units, nested

FORWARD, BACKWARD = "forward", "backward"
LOSS = "loss"
"""Name of what follows the model's output, as a unit without parameters."""
Loss = Callable[[nn.Module], torch.Tensor]
"""Function that runs the model on a microbatch that it makes, and returns a scalar."""


@dataclass(frozen=True)
class UnitSpan:
    """Span of a unit in one direction; `saved_bytes` are the live bytes at its end, without gradients."""

    direction: str
    unit: str
    peak_bytes: int
    saved_bytes: int
    work: OperatorWork


@dataclass(frozen=True)
class InFlight:
    """Microbatches in flight on a rank of a pipeline; by default those of a run without one.

    Attributes:
        ahead: Forwards before the first backward.
        room_bytes: Bytes of receive buffers for hidden states and gradients.
        names: Number of parameters of all pipeline stages.
        shared: Names of tied parameters at both ends of the pipeline.
        sent: Traffic of hidden states and their gradients along pp per step.
    """

    ahead: int = 1
    room_bytes: int = 0
    names: int = 0
    shared: Collection[str] = ()
    sent: Traffic = field(default_factory=Traffic)


@dataclass(frozen=True)
class MicrobatchCosts:
    """Spans of one microbatch in time order, and what the ZeRO table lacks: the ranks along cp and ep, the pipeline."""

    spans: tuple[UnitSpan, ...]
    beside: Mapping[str, int] = field(default_factory=dict)
    flights: InFlight = field(default_factory=InFlight)

    @property
    def in_flight_bytes(self) -> int:
        """Activations that other microbatches hold between forward and backward, and receive buffers."""
        saved = [span.saved_bytes for span in self.spans if span.direction == FORWARD]
        return (self.flights.ahead - 1) * saved[-1] + self.flights.room_bytes if saved else 0

    def work(self, direction: str) -> OperatorWork:
        """Return all work in one direction; recomputation belongs to backward."""
        return sum((span.work for span in self.spans if span.direction == direction), OperatorWork())


STATES_ALONE = MicrobatchCosts(())
"""Costs of no computation at all."""


def costs_of(
    model: nn.Module,
    loss: Loss,
    choice: UnitChoice = BLOCKS_AND_ENDS,
    *,
    ledger: Ledger | None = None,
    beside: Mapping[str, int] | None = None,
    experts: Mapping[str, nn.Module] | None = None,
    fuses_casts: bool = False,
) -> MicrobatchCosts:
    """Measure the costs of one microbatch of `model`, on meta in its compute dtype, on fake tensors.

    `choice` tells which modules are units, `experts` which of them ranks share, by name. Attention (cp) and experts
    (ep) count their traffic in `ledger`; `beside` has the ranks along both. `fuses_casts` if blocks are compiled, of
    which casts to 8 bits alone are counted so.
    """
    modules = dict(find_units(model, choice, experts))
    around = nested([*modules, ROOT])
    meter = _CostMeter(ledger or Ledger(), fuses_casts=fuses_casts)
    with fake_tensors(), intercept(meter.run):
        with meter.unseen():
            model = model.to_empty(device="cpu")
            held = {param for module in (experts or {}).values() for param in module.parameters()}
            if any(isinstance(param, DTensor) for param in {*model.parameters()} - held):
                # DTensor runs every new operator on global shapes to learn its output placement.
                loss(model).backward()  # type: ignore[no-untyped-call]
                model.zero_grad()
        owner = {param: name for name, each in modules.items() for module in each for param in module.parameters()}
        for name in around:
            owner |= {param: name for module in modules[name] for param in module.parameters()}
        for name, each in modules.items():
            for module in each:
                meter.follow(name, module, around.get(name, ROOT))
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


def _grouped(rows: torch.Tensor, weights: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
    """Return the grouped product of fake tensors; torch computes it in any dtype, but foresees it in bf16 alone."""
    out: torch.Tensor = GROUPED.default(rows.to(torch.bfloat16), weights.to(torch.bfloat16), *others, **named)
    return out.to(rows.dtype)


class _CostMeter:
    """Meter that counts live storages and operators by running unit."""

    def __init__(self, ledger: Ledger, *, fuses_casts: bool) -> None:
        self.spans: list[UnitSpan] = []
        self._ledger, self._fuses_casts = ledger, fuses_casts
        self._live: dict[int, int] = {}
        self._bytes = self._peak = 0
        self._work = OperatorWork()
        self._at = (FORWARD, ROOT)
        self._seen = True
        self._grads: dict[str, list[nn.Parameter]] = {}
        self._around: dict[str, str] = {}

    def run(self, func: Any, types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, and count it."""
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # DTensors and operands in 8 bits dispatch the tensors inside of them
        out = _grouped(*args, **kwargs) if func is GROUPED.default else func(*args, **kwargs)
        self._work += work_of(func, args, kwargs, out, fuses_casts=self._fuses_casts)
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._take(tensor.untyped_storage())
        return out

    def _take(self, storage: torch.UntypedStorage) -> None:
        key = storage_key(storage)
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
        """Exclude what is allocated or computed inside."""
        self._seen = False
        try:
            yield
        finally:
            self._seen, self._work = True, OperatorWork()
            self._ledger.take()

    def enter(self, direction: str, unit: str) -> None:
        """Start the span of a unit, unless it is the current one."""
        if (direction, unit) == self._at:
            return
        self.close(self._around.get(unit) == self._at[1])
        self._at = direction, unit

    def close(self, for_inner: bool = False) -> None:
        """End the current span; `for_inner` if its unit goes on after a unit inside it."""
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
        """End the backward of `unit` unless another unit has started."""
        if self._at == (BACKWARD, unit):
            self.enter(BACKWARD, around)

    def hold(self, unit: str, param: nn.Parameter) -> None:
        """Keep a new gradient until the backward of its unit ends and it is reduced; drop it if that has ended."""
        if unit in (ROOT, self._at[1], self._around.get(self._at[1])):
            self._grads.setdefault(unit, []).append(param)
        else:
            param.grad = None

    def follow(self, unit: str, module: nn.Module, around: str = ROOT) -> None:
        """Track a module of `unit`: forward by module hooks, backward by gradient hooks on its outputs and inputs.

        A recomputed forward belongs to the backward of its unit, but a unit inside has a span of its own there too.
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
