"""What it costs this rank to have its parameters gathered and its gradients reduced: sharded units at work, for real.

    figure           measured on                                                     per
    latency_s        narrow decoder blocks, forward and backward, stage 3            collective
    all_gather       forward of large linear layers, one token, stage 3              byte sent
    reduce_scatter   their backward, less its gathers                                byte sent

So hooks, waits, copies into and out of buffers and their memory are in the rates, as they are in a run; what the same
layers take unsharded is subtracted. zero.reduction=auto: fp32 sums of bf16 on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dzero.mesh import make_mesh
from dzero.models.llama import Llama
from dzero.plan.clock import median_of_rounds
from dzero.plan.operators import DTYPE, FEW, NARROW, decoder_loss
from dzero.zero.layout import ZeroConfig
from dzero.zero.shard import Sharded, shard

LAYERS = 4


class ExchangeRates(NamedTuple):
    """Bytes/s that each rank sends, None with one rank alone; seconds."""

    all_gather: float | None
    reduce_scatter: float | None
    latency_s: float


def exchange_rates(device: torch.device, *, unit_bytes: int, rounds: int) -> ExchangeRates:
    """unit_bytes: of each rank's part of a unit in bf16. A collective: every rank of the default group calls it."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return ExchangeRates(None, None, 0.0)
    width = isqrt(unit_bytes // 2 * ranks)
    sent = LAYERS * (ranks - 1) * -(-width // ranks) * width * 2
    latency_s = _latency_s(device, 2 * rounds)
    forward_s, both_s = _linear_s(width, device, rounds)
    gather_s, reduce_s = (each - LAYERS * latency_s for each in (forward_s, both_s - 2 * forward_s))
    return ExchangeRates(
        all_gather=sent / max(gather_s, 0.1 * forward_s, 1e-9),
        reduce_scatter=sent / max(reduce_s, 0.1 * forward_s, 1e-9),
        latency_s=latency_s,
    )


def _latency_s(device: torch.device, rounds: int) -> float:
    """Of one collective with little to move, and all that belongs to it."""
    loss = partial(decoder_loss, sequences=1, length=FEW)
    more_s = _more_s(lambda: Llama(NARROW).to(DTYPE), loss, device, rounds, backward=True)
    return max(more_s / (3 * (NARROW.layers + 1)), 1e-9)


def _linear_s(width: int, device: torch.device, rounds: int) -> tuple[float, float]:
    """Of the gathers of forward, and of all collectives of forward and backward."""

    def layers() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=DTYPE) for _ in range(LAYERS)))

    token = torch.ones(1, width, dtype=DTYPE, device=device, requires_grad=True)
    forward_s, both_s = (
        _more_s(layers, lambda model: model(token).sum(), device, rounds, backward=way) for way in (False, True)
    )
    return forward_s, both_s


def _more_s(
    make: Callable[[], nn.Module],
    loss: Callable[[nn.Module], torch.Tensor],
    device: torch.device,
    rounds: int,
    *,
    backward: bool,
) -> float:
    """What a microbatch takes more where the model is sharded at stage 3."""
    with device:
        plain, model = make(), make()
    sharded = shard(model, ZeroConfig(stage=3), mesh=make_mesh(device.type))

    def run(model: nn.Module) -> None:
        with torch.set_grad_enabled(backward):
            value = loss(model)
        if backward:
            value.backward()  # type: ignore[no-untyped-call]
            model.zero_grad()

    def step(sharded: Sharded) -> None:
        with sharded.microbatch():
            run(sharded.model)
        sharded.abandon_step()

    sharded_s = median_of_rounds(lambda: step(sharded), device, rounds)
    dist.barrier()
    return sharded_s - median_of_rounds(lambda: run(plain), device, rounds)
