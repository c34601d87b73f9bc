"""Cost of operators besides matrix products, and of collectives, measured on small decoders while all ranks are busy.

    figure        measured on                           divided by the count of `microbatch_costs.py`
    attention     causal attention and its backward     FLOPs
    operator_s    narrow blocks, few tokens             calls; time besides matrix products and attention
    bandwidth     wide blocks, many tokens              bytes; time besides all of the above

    figure        what sharding adds, measured on       divided by the count of `transfers.py`
    latency_s     narrow blocks, few tokens             collectives
    link          wide blocks; many tokens on a CPU,    bytes, latencies deducted
                  few on a GPU, so that nothing hides

A prediction multiplies the same counts again (`step_time.py`). The rates therefore include costs that are not counted,
such as the memory that an operator allocates for its result. Sharding adds the time of forward and backward at stage 3,
minus the time of the same decoder unsharded, so rates of collectives include hooks, waits for slower ranks, buffer
copies and allocations, as in a run. The probe uses zero.reduction=auto, which on a CPU sums bf16 in fp32.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from dzero.estimate.medians import median_of_rounds, seconds_of
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD, costs_of
from dzero.estimate.operator_work import OperatorWork
from dzero.estimate.transfers import moved_of
from dzero.mesh import make_mesh
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.zero.config import ZeroConfig
from dzero.zero.shard import shard

NARROW = LlamaShape(vocab_size=256, hidden_size=64, layers=4, heads=2, kv_heads=2, ffn_size=128)
WIDE = LlamaShape(vocab_size=4096, hidden_size=512, layers=2, heads=8, kv_heads=8, ffn_size=1408)
FEW, SEQUENCE = 16, 256
DTYPE = torch.bfloat16
ATTENTION = (2, 8, SEQUENCE, 64)


class OperatorRates(NamedTuple):
    """Rates in FLOP/s, seconds per call, and bytes/s."""

    attention: float
    operator_s: float
    bandwidth: float


class ExchangeRates(NamedTuple):
    """Bytes/s that each rank sends (None with a single rank), and seconds per collective."""

    link: float | None
    latency_s: float


def operator_rates(device: torch.device, matmul_flops: float, *, tokens: int, budget_s: float) -> OperatorRates:
    """Measure the rates of operators in `budget_s` seconds each, the larger one on `tokens` tokens."""
    attention = _attention_flops(device, budget_s)

    def left(seconds: float, work: OperatorWork) -> float:
        """Return the seconds besides matrix products and attention, at least 5 % in case of noisy timings."""
        return max(seconds - work.flops / matmul_flops - work.attention / attention, 0.05 * seconds)

    few_s, few = _decoder(NARROW, 1, FEW, device, budget_s)
    operator_s = left(few_s, few) / few.calls
    many_s, many = _decoder(WIDE, max(1, tokens // SEQUENCE), SEQUENCE, device, budget_s)
    calls_s = many.calls * operator_s if device.type == "cpu" else 0.0  # on a GPU, launches overlap with execution
    return OperatorRates(attention, operator_s, many.bytes / max(left(many_s, many) - calls_s, 0.05 * many_s))


def _attention_flops(device: torch.device, budget_s: float) -> float:
    """Return the FLOP/s of causal attention and its backward, with all products counted as in `microbatch_costs.py`."""
    query, key, value = (torch.randn(ATTENTION, device=device, dtype=DTYPE, requires_grad=True) for _ in range(3))

    def run() -> None:
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed.sum().backward()  # type: ignore[no-untyped-call]

    batch, heads, time, dim = ATTENTION
    flops = 7 * 2 * batch * heads * time**2 * dim  # two products forward, five backward
    return flops / seconds_of(run, device, budget_s)


def _decoder(
    shape: LlamaShape, sequences: int, length: int, device: torch.device, budget_s: float
) -> tuple[float, OperatorWork]:
    """Return the seconds and the work of forward and backward of a decoder on zeros."""
    loss = partial(decoder_loss, sequences=sequences, length=length)
    with device:
        model = Llama(shape).to(DTYPE)
    with torch.device("meta"):
        costs = costs_of(Llama(shape).to(DTYPE), loss)
    seconds = seconds_of(lambda: loss(model).backward(), device, budget_s)  # type: ignore[no-untyped-call]
    return seconds, costs.work(FORWARD) + costs.work(BACKWARD)


def decoder_loss(model: nn.Module, *, sequences: int, length: int) -> torch.Tensor:
    """Return the mean cross-entropy of tokens that are all 0."""
    device = next(model.parameters()).device
    tokens, targets = (torch.zeros(sequences, length, dtype=torch.int64, device=device) for _ in range(2))
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def exchange_rates(device: torch.device, *, rounds: int) -> ExchangeRates:
    """Measure the rates of collectives; a collective call of all ranks of the default group."""
    if dist.get_world_size() == 1:
        return ExchangeRates(None, 0.0)
    seconds, _, calls = _added(NARROW, FEW, device, 2 * rounds)
    latency_s = max(seconds / calls, 1e-9)
    seconds, sent_bytes, calls = _added(WIDE, SEQUENCE if device.type == "cpu" else FEW, device, rounds)
    return ExchangeRates(sent_bytes / max(seconds - calls * latency_s, 0.1 * abs(seconds), 1e-9), latency_s)


def _added(shape: LlamaShape, length: int, device: torch.device, rounds: int) -> tuple[float, int, int]:
    """Return what sharding adds to one microbatch: seconds, bytes sent, number of collectives."""
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
    return sharded_s - plain_s, sum(moved.axes.values()), sum(moved.calls.values())
