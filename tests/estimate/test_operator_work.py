"""The work that a plan counts on fake tensors is that of the same operators on real ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dzero import PrecisionConfig
from dzero.estimate.decoder_probe import decoder_loss
from dzero.estimate.microbatch_costs import BACKWARD, FORWARD, costs_of
from dzero.estimate.operator_work import ATTENTION, ATTENTION_BACKWARD, FLOPS, OperatorWork, work_of
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig
from dzero.zero.float8_layers import convert_linear_layers

SHAPE = LlamaShape(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48)
LOSS = partial(decoder_loss, sequences=2, length=16)


class Counting(TorchDispatchMode):
    """Sums the work of what really runs."""

    def __init__(self) -> None:
        super().__init__()
        self.work, self.names = OperatorWork(), list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.work += work_of(func, args, kwargs or {}, out)
        self.names.append(str(func))
        return out


def decoder(recompute: str) -> Llama:
    model = Llama(SHAPE).to(torch.bfloat16)
    apply_blocks(model, BlockConfig(activation_checkpoint=recompute, compile=False), "cpu")
    return model


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_work_of_a_decoder_is_that_of_a_real_one(recompute: str) -> None:
    with torch.device("meta"):
        costs = costs_of(decoder(recompute), LOSS)
    model = decoder(recompute)
    with Counting() as real:
        LOSS(model).backward()
    assert costs.work(FORWARD) + costs.work(BACKWARD) == real.work, real.names


def test_the_work_of_a_linear_and_a_relu_by_hand() -> None:
    """y = relu(x W^T) of fp32, x: [5, 3], W: [4, 3]; summed. Backward makes W's gradient alone."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.ReLU())
    costs = costs_of(model, lambda made: made(torch.zeros(5, 3)).sum())
    forward, backward = costs.work(FORWARD), costs.work(BACKWARD)
    assert forward.flops == backward.flops == 2 * 5 * 3 * 4
    zeros, relu, sum_, ones_like, under_threshold = 5 * 3, 2 * 5 * 4, 5 * 4 + 1, 2, 3 * 5 * 4
    assert forward.bytes == 4 * (zeros + relu + sum_)
    assert backward.bytes == 4 * (ones_like + under_threshold), "expand is a view: what is read is its 5 x 4"


@pytest.mark.parametrize(("fuses", "bytes_of_cast"), [(False, 33), (True, 5)])
def test_a_layer_in_8_bits_makes_six_casts_for_its_three_products(fuses: bool, bytes_of_cast: int) -> None:
    """x [64, 32], W [48, 32]: every operand is cast for each product it is in. Scales of one number are left out."""
    tokens, inputs, outputs = 64, 32, 48
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(inputs, outputs, bias=False)).to(torch.bfloat16)
    convert_linear_layers(model, PrecisionConfig(compute="fp8_tensorwise"), emulate=False)

    def loss(made: nn.Module) -> torch.Tensor:
        return made(torch.empty(tokens, inputs, dtype=torch.bfloat16, requires_grad=True)).sum()

    costs = costs_of(model, loss, fuses_casts=fuses)
    work = costs.work(FORWARD) + costs.work(BACKWARD)
    assert work.flops == 0
    assert work.fp8_flops == 3 * 2 * tokens * inputs * outputs
    cast = bytes_of_cast * 2 * (tokens * inputs + inputs * outputs + tokens * outputs)
    summed = 2 * tokens * outputs
    assert 0 <= work.bytes - cast - summed < 0.2 * 5 * cast / bytes_of_cast, "scales, and operands that are transposed"


def test_attention_of_grouped_heads_has_the_products_of_all() -> None:
    """Two products forward, with the scores again five backward: of 2 x 5 x 7 positions, heads of 3."""
    query, grad = torch.empty(2, 4, 5, 3, device="meta"), torch.empty(2, 4, 5, 3, device="meta")
    key, value = torch.empty(2, 2, 7, 3, device="meta"), torch.empty(2, 2, 7, 3, device="meta")
    product = 2 * (2 * 4) * 5 * 7 * 3
    assert {FLOPS[kind](query, key, value, out_val=None) for kind in ATTENTION} == {2 * product}
    assert {FLOPS[kind](grad, query, key, value, out_val=None) for kind in ATTENTION_BACKWARD} == {5 * product}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_products_of_experts_are_counted_in_any_dtype(dtype: torch.dtype) -> None:
    """Rows [n, k] of e experts with weights [k, m] each, and both gradients; torch foresees them in bf16 alone."""
    n, k, m, e = 32, 16, 24, 4

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.empty(e, k, m, dtype=dtype))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            ends = torch.full((e,), n // e).cumsum(0, dtype=torch.int32)
            return nn.functional.grouped_mm(rows, self.weights, offs=ends)

    with torch.device("meta"):
        model = Experts()
    costs = costs_of(model, lambda made: made(torch.empty(n, k, dtype=dtype, requires_grad=True)).square().sum())
    assert (costs.work(FORWARD).flops, costs.work(BACKWARD).flops) == (2 * n * k * m, 2 * 2 * n * k * m)
