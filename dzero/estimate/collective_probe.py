"""What it costs this rank that parameters are gathered and gradients reduced: sharded decoders at work, for real.

    figure       measured on                                                             per
    latency_s    narrow blocks, a few tokens                                             collective
    link         wide blocks; on a CPU many tokens, on a GPU few, so that nothing hides  byte sent, besides latencies

Forward and backward at stage 3, less what the same decoder takes unsharded. So hooks, waits for a rank that is behind,
copies into and out of buffers and their memory are in the rates, as they are in a run. zero.reduction=auto: on a CPU,
fp32 sums of bf16.
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
from dzero.models.llama import Llama
from dzero.models.shapes import LlamaShape
from dzero.zero.config import ZeroConfig
from dzero.zero.shard import shard


class ExchangeRates(NamedTuple):
    """Bytes/s that each rank sends, None with one rank alone; seconds."""

    link: float | None
    latency_s: float


class _Extra(NamedTuple):
    """What sharding adds to a microbatch: seconds, bytes sent, collectives."""

    seconds: float
    sent_bytes: int
    calls: int


def exchange_rates(device: torch.device, *, rounds: int) -> ExchangeRates:
    """A collective: every rank of the default group calls it."""
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
