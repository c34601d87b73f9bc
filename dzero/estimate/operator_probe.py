"""Cost of operators other than matrix products on this rank, measured on decoder blocks while all ranks are busy.

    figure        measured on                           divided by the count of `microbatch_costs.py`
    attention     causal attention and its backward     FLOPs
    operator_s    narrow blocks, few tokens             calls; time besides matrix products and attention
    bandwidth     wide blocks, many tokens              bytes; time besides all of the above

A prediction multiplies the same counts again (`step_time.py`). The rates therefore include costs that are not counted,
such as the memory that an operator allocates for its result.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from dzero.estimate.medians import seconds_of
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD, costs_of
from dzero.estimate.operator_work import OperatorWork
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama

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


def operator_rates(device: torch.device, matmul_flops: float, *, tokens: int, budget_s: float) -> OperatorRates:
    """Measure the rates of operators.

    Args:
        device: Device of this rank.
        matmul_flops: FLOP/s that bf16 matrix products reach.
        tokens: Tokens of the larger measurement.
        budget_s: Seconds per measurement.
    """
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
