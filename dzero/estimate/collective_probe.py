"""Cost of all-gathers and reduce-scatters on this rank, measured by training small sharded decoders.

    figure       measured on                                                              unit
    latency_s    narrow blocks, few tokens                                                seconds per collective
    link         wide blocks; many tokens on a CPU, few on a GPU, so that nothing hides   bytes/s, latencies deducted

The measurement is the time of forward and backward at stage 3, minus the time of the same decoder unsharded. The rates
therefore include hooks, waits for slower ranks, buffer copies and allocations, as in a run. The probe uses
zero.reduction=auto, which on a CPU sums bf16 in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from dzero.estimate.medians import median_of_rounds
from dzero.estimate.operator_probe import DTYPE, FEW, NARROW, SEQUENCE, WIDE, decoder_loss
from dzero.estimate.transfers import moved_of
from dzero.mesh import make_mesh
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.zero.config import ZeroConfig
from dzero.zero.shard import shard


class ExchangeRates(NamedTuple):
    """Bytes/s that each rank sends (None with a single rank), and seconds per collective."""

    link: float | None
    latency_s: float


class _Extra(NamedTuple):
    """Cost that sharding adds to one microbatch: seconds, bytes sent, number of collectives."""

    seconds: float
    sent_bytes: int
    calls: int


def exchange_rates(device: torch.device, *, rounds: int) -> ExchangeRates:
    """Measure the rates of collectives; a collective call of all ranks of the default group."""
    if dist.get_world_size() == 1:
        return ExchangeRates(None, 0.0)
    narrow = _extra(NARROW, FEW, device, 2 * rounds)
    latency_s = max(narrow.seconds / narrow.calls, 1e-9)
    wide = _extra(WIDE, SEQUENCE if device.type == "cpu" else FEW, device, rounds)
    moving_s = wide.seconds - wide.calls * latency_s
    return ExchangeRates(wide.sent_bytes / max(moving_s, 0.1 * abs(wide.seconds), 1e-9), latency_s)


def _extra(shape: LlamaShape, length: int, device: torch.device, rounds: int) -> _Extra:
    loss = partial(decoder_loss, sequences=1, length=length)
    with device:
        plain, model = (Llama(shape).to(DTYPE) for _ in range(2))
    sharded = shard(model, ZeroConfig(stage=3), mesh=make_mesh(device.type))

    def run(model: nn.Module) -> None:
        loss(model).backward()  # type: ignore[no-untyped-call]
        model.zero_grad()

    def step() -> None:
        with sharded.microbatch():
            run(sharded.model)
        sharded.abandon_step(sharded.names)

    sharded_s = median_of_rounds(step, device, rounds)
    dist.barrier()
    plain_s = median_of_rounds(lambda: run(plain), device, rounds)
    moved = moved_of(sharded.layout, sharded.shapes)
    return _Extra(sharded_s - plain_s, sum(moved.axes.values()), sum(moved.calls.values()))
