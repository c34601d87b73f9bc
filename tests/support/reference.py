"""The oracle: N data-parallel ranks emulated in turn in one process, with plain tensors and nothing of dzero.

    forward, backward   working dtype w, per rank and microbatch: loss / M, times the loss scale
    late reduction      a rank adds its microbatches in the grad dtype; one reduction (stages 0, 1; or M = 1)
    early reduction     every microbatch is reduced, then added in the grad dtype (stages 2, 3 with M > 1)
    reduce              wire dtype in, fp32 sum in rank order, * fp32(1/N), rounded once to the grad dtype
    norm                sum of squares in fp64 per (parameter, chunk of dim 0), added in rank order; / scale
    update              AdamW on fp32 masters, every operation a rounded fp32 operation of its own
    working copy        bf16: nearest, ties away from zero; fp16: nearest, ties to even; fp32: the master
    overflow            a norm that is not finite: the step is skipped and only the loss scale moves

`train` runs on one thread, so that matrix products have the bits of a one-thread worker.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Named = dict[str, Tensor]
Moments = tuple[Tensor, ...]
LossFn = Callable[[nn.Module, Any], Tensor]
Rule = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""(master, moment, gradient, rate) -> the new master and moment, all fp32 of one shape."""


@dataclass(frozen=True, kw_only=True)
class Numerics:
    """`working`: parameters, forward, backward. `wire`: what ranks exchange. `grad`: what is kept of it."""

    working: torch.dtype = torch.float32
    wire: torch.dtype = torch.float32
    grad: torch.dtype = torch.float32
    early: bool = False

    def __post_init__(self) -> None:
        if self.grad not in (self.working, torch.float32):
            raise ValueError(f"grad={self.grad}: use the working dtype {self.working} or torch.float32")


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Decoupled weight decay on every trainable parameter. `moments`: the dtype they are stored in."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    moments: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class LossScale:
    """Doubles after `growth_interval` good steps in a row; halves, down to `floor`, at the
    `hysteresis`-th overflow in a row and at each one after it."""

    init: float = 2.0**16
    growth_interval: int = 2000
    hysteresis: int = 1
    floor: float = 1.0


@dataclass(kw_only=True)
class History:
    """One entry per attempted step, and the state at the end by the first name of each parameter.

    `losses`: mean over ranks and microbatches, unscaled. `norms`: global, unscaled, before clipping. `scales`:
    the loss scale of the step. `masters`, `moments` (first, second): of trainable parameters; `params`: of all,
    in the working dtype. `updates`: steps that were not skipped.
    """

    masters: Named
    moments: dict[str, Moments]
    params: Named = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    updates: int = 0
    final_scale: float = 1.0


def sum_squares(chunk: Tensor) -> float:
    """fp64 sum of squares of a chunk [any shape, any float dtype]; the order inside is torch's."""
    return chunk.double().square().sum().item()


def sum_squares_in_lanes(chunk: Tensor) -> float:
    """The same in the order that dzero promises: of each 2^20 elements, element i is added to lane i mod 256, then the
    lanes in order; then what these pieces have, in order."""
    total = 0.0
    for piece in chunk.double().flatten().split(1 << 20):
        lanes = torch.zeros(256, dtype=torch.float64)
        for row in torch.nn.functional.pad(piece.square(), (0, -piece.numel() % 256)).view(-1, 256):
            lanes += row
        total += functools.reduce(operator.add, lanes.tolist(), 0.0)
    return total


def train(
    model_fn: Callable[[], nn.Module],
    batches: Sequence[Sequence[Sequence[Any]]],
    loss_fn: LossFn,
    *,
    lrs: Sequence[float],
    numerics: Numerics | None = None,
    adamw: AdamW | None = None,
    clip: float | None = None,
    loss_scale: LossScale | None = None,
    sum_squares: Callable[[Tensor], float] = sum_squares,
    delay_after: int | None = None,
    rules: Mapping[str, Rule] | None = None,
) -> History:
    """Train `model_fn()` (fp32 parameters) on `batches[step][rank][microbatch]`, step i with rate `lrs[i]`.

    `loss_fn(model, batch)`: the fp32 mean over a microbatch. `clip`: the largest global norm. A skipped step
    uses up its batches and its rate. `delay_after`: after so many updates the model sees each one a step late. `rules`:
    by parameter, what updates it in place of AdamW and keeps one moment.
    Raises ValueError if a trainable parameter gets no gradient.
    """
    numerics, adamw, rules = numerics or Numerics(), adamw or AdamW(), rules or {}
    model, scaler = model_fn(), _Scaler(loss_scale)
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    zeros = {name: torch.zeros_like(master, dtype=adamw.moments) for name, master in masters.items()}
    moments: dict[str, Moments] = {name: (zero,) if name in rules else (zero, zero) for name, zero in zeros.items()}
    history = History(masters=masters, moments=moments)
    for p in model.parameters():
        p.data = to_working(p.detach(), numerics.working)
    late: Named = {}
    with _one_thread():
        for of_step, lr in zip(batches, lrs, strict=True):
            loss, grads = _gradients(model, of_step, loss_fn, numerics, scaler.scale)
            norm = global_norm(grads, len(of_step), sum_squares) / scaler.scale
            history.losses.append(loss)
            history.norms.append(norm)
            history.scales.append(scaler.scale)
            history.skipped.append(not math.isfinite(norm))
            seen = {name: p.data for name, p in model.named_parameters()} | late
            if math.isfinite(norm):
                _update_all(model, history, grads, _factor(norm, clip, scaler.scale), lr, adamw, rules)
            late = {}
            if delay_after is not None and (not math.isfinite(norm) or history.updates > delay_after):
                late = {name: p.data for name, p in model.named_parameters()} if math.isfinite(norm) else {}
                for name, p in model.named_parameters():
                    p.data = seen[name]
            scaler.advance(math.isfinite(norm))
    history.params = {name: late.get(name, p.detach()).clone() for name, p in model.named_parameters()}
    history.final_scale = scaler.scale
    return history


def to_working(master: Tensor, dtype: torch.dtype) -> Tensor:
    """A new tensor: fp32 [any shape] rounded once to `dtype`; bf16 by integers, ties away from zero."""
    if dtype != torch.bfloat16:
        return master.to(dtype, copy=True)
    bits = master.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    high = ((bits + 0x8000) & 0xFFFFFFFF) >> 16
    return torch.where(high >= 0x8000, high - 0x10000, high).to(torch.int16).view(torch.bfloat16)


def reduce(payloads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Mean over ranks: fp32 sum of the payloads in rank order, times fp32(1/N), rounded once to `dtype`."""
    total = payloads[0].float()
    for payload in payloads[1:]:
        total = total + payload.float()
    return (total * fp32(1.0 / len(payloads))).to(dtype)


def global_norm(grads: Named, ranks: int, sum_squares: Callable[[Tensor], float] = sum_squares) -> float:
    """Root of the sum over parameters, in order, of the sum over `ranks` chunks of dim 0, in rank order."""
    total = 0.0
    for grad in grads.values():  # a rank beyond the last chunk holds nothing and adds nothing
        of_parameter = 0.0
        for chunk in grad.chunk(ranks, dim=0):
            of_parameter += sum_squares(chunk)
        total += of_parameter
    return math.sqrt(total)


def update(master: Tensor, moments: Moments, g: Tensor, step: int, lr: float, adamw: AdamW) -> tuple[Tensor, Moments]:
    """AdamW at its `step`-th update (from 1): the new master and the new moments, first and second.

    All in fp32, one rounding per operation; moments are rounded (to nearest even) only when stored.
    """
    correction1, correction2 = 1 - adamw.beta1**step, 1 - adamw.beta2**step
    m, v = (x.float() for x in moments)
    m = m * fp32(adamw.beta1) + g * fp32(1 - adamw.beta1)
    v = v * fp32(adamw.beta2) + (g * g) * fp32(1 - adamw.beta2)
    denominator = square_root(v) * fp32(1 / math.sqrt(correction2)) + fp32(adamw.eps)
    decayed = master * fp32(1 - lr * adamw.weight_decay)
    master = decayed - (m / denominator) * fp32(lr / correction1)
    return master, (m.to(adamw.moments), v.to(adamw.moments))


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded fp32 root. torch.sqrt on CPU is not (MKL: one unit off for 0.6 % of patterns); by fp64
    it is, as 53 bits are at least 2 * 24 + 2."""
    return x.double().sqrt().float()


def fp32(x: float) -> Tensor:
    """A 0-dim fp32 tensor: the scalar is rounded here, once, whatever torch does with Python numbers."""
    return torch.tensor(x, dtype=torch.float32)


def _gradients(
    model: nn.Module, batches: Sequence[Sequence[Any]], loss_fn: LossFn, numerics: Numerics, scale: float
) -> tuple[float, Named]:
    """The mean loss and the reduced gradients (grad dtype, still scaled) of `batches[rank][microbatch]`."""
    per_rank = [_of_rank(model, of_rank, loss_fn, numerics, scale) for of_rank in batches]
    grads: Named = {}
    for payloads in zip(*(payloads for _, payloads in per_rank), strict=True):  # one reduction: rank -> payload
        for name in payloads[0]:
            reduced = reduce([payload[name] for payload in payloads], numerics.grad)
            grads[name] = grads[name] + reduced if name in grads else reduced
    return sum(loss for loss, _ in per_rank) / len(batches), grads


def _of_rank(
    model: nn.Module, batches: Sequence[Any], loss_fn: LossFn, numerics: Numerics, scale: float
) -> tuple[float, list[Named]]:
    """One rank: its mean loss, and what it sends to each reduction (early: per microbatch; late: one)."""
    losses: list[float] = []
    kept: list[Named] = []
    for batch in batches:
        loss = loss_fn(model, batch)
        losses.append(loss.item())
        (loss / len(batches) * fp32(scale)).backward()  # type: ignore[no-untyped-call]
        fresh = _take_gradients(model)
        if numerics.early:
            kept.append(fresh)
        else:
            fresh = {name: g.to(numerics.grad) for name, g in fresh.items()}
            kept = [{name: kept[0][name] + g for name, g in fresh.items()} if kept else fresh]
    payloads = [{name: g.to(numerics.wire) for name, g in grads.items()} for grads in kept]
    return sum(losses) / len(losses), payloads


def _take_gradients(model: nn.Module) -> Named:
    grads: Named = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            if p.grad is None:
                raise ValueError(f"{name} got no gradient: use it in the loss, or freeze it")
            grads[name], p.grad = p.grad, None
    return grads


def _factor(norm: float, clip: float | None, scale: float) -> Tensor:
    """What multiplies each gradient element, 0-dim fp32: the clip coefficient over the loss scale."""
    coefficient = 1.0 if clip is None else min(1.0, clip / (norm + 1e-6))
    return fp32(coefficient) * fp32(1.0 / scale)


def _update_all(
    model: nn.Module,
    state: History,
    grads: Named,
    factor: Tensor,
    lr: float,
    adamw: AdamW,
    rules: Mapping[str, Rule],
) -> None:
    state.updates += 1
    for name, p in model.named_parameters():
        if name in grads:
            g = grads[name].float() * factor
            master, moments = state.masters[name], state.moments[name]
            if name in rules:
                master, moment = rules[name](master, moments[0], g, lr)
                moments = (moment,)
            else:
                master, moments = update(master, moments, g, state.updates, lr, adamw)
            state.masters[name], state.moments[name] = master, moments
            p.data = to_working(master, p.dtype)


class _Scaler:
    """The loss scale; 1 for ever without a `LossScale`."""

    def __init__(self, config: LossScale | None) -> None:
        self.config, self.scale = config, config.init if config else 1.0
        self.good, self.overflows = 0, 0

    def advance(self, finite: bool) -> None:
        if self.config is None:
            return
        self.good, self.overflows = (self.good + 1, 0) if finite else (0, self.overflows + 1)
        if self.good == self.config.growth_interval:
            self.scale, self.good = self.scale * 2.0, 0
        if self.overflows >= self.config.hysteresis:
            self.scale = max(self.scale * 0.5, self.config.floor)


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
