"""Promises of the oracle: each against something written by someone else, or worked out by hand."""

from __future__ import annotations

import ast
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from reference import AdamW, global_norm, to_working, train, update
from small_decoders import batches, build, loss_fn
from torch import Tensor, nn

STEPS = 6
LRS = [1e-2 * (i + 1) / STEPS for i in range(STEPS)]


def floats(*patterns: int) -> Tensor:
    return torch.tensor(patterns, dtype=torch.int64).to(torch.uint32).view(torch.float32)


def test_imports_nothing_of_the_code_it_judges() -> None:
    tree = ast.parse(Path(reference.__file__).read_text())
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in imported} <= {
        "__future__", "functools", "math", "operator", "collections", "contextlib", "dataclasses", "typing", "torch",
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "clip"), [("uneven", None), ("even", 0.5), ("tied", 0.5), ("frozen", 0.5)])
def test_one_fp32_rank_trains_as_torch_adamw_does(kind: str, clip: float | None) -> None:
    data = batches(kind, steps=STEPS, ranks=1, microbatches=2)
    ours = train(partial(build, kind), data, loss_fn, lrs=LRS, clip=clip)

    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for ((first, second),), lr, norm, mean in zip(data, LRS, ours.norms, ours.losses, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        losses = [loss_fn(model, first), loss_fn(model, second)]
        (sum(losses) / 2).backward()  # type: ignore[union-attr]
        theirs = nn.utils.clip_grad_norm_(model.parameters(), clip or math.inf).item()
        optimizer.step()
        optimizer.zero_grad()
        assert norm == pytest.approx(theirs, rel=1e-5)
        assert mean == pytest.approx((losses[0].item() + losses[1].item()) / 2, rel=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours.params[name], p.detach(), rtol=1e-5, atol=2e-5)
    assert (min(ours.norms) > 0.5) or clip is None


def test_update_is_one_rounded_fp32_operation_at_a_time() -> None:
    """Against NumPy's float32: no fused multiply-add, correctly rounded root, scalars rounded once."""
    generator = np.random.default_rng(0)
    f = np.float32
    p, g, m = (generator.standard_normal(20_001).astype(f) for _ in range(3))
    v = np.exp(generator.uniform(-90, 20, 20_001).astype(f))
    step, lr, c = 7, 3e-4, AdamW()
    start_p, start_m, start_v, grad = (torch.from_numpy(x) for x in (p, m, v, g))
    ours = update(start_p, (start_m, start_v), grad, step, lr, c)

    m = m * f(c.beta1) + g * f(1 - c.beta1)
    v = v * f(c.beta2) + (g * g) * f(1 - c.beta2)
    denominator = np.sqrt(v) * f(1 / math.sqrt(1 - c.beta2**step)) + f(c.eps)
    master = p * f(1 - lr * c.weight_decay) - (m / denominator) * f(lr / (1 - c.beta1**step))
    assert master.dtype == m.dtype == v.dtype == f
    for mine, theirs in zip((ours[0], *ours[1]), (master, m, v), strict=True):
        assert torch.equal(mine.view(torch.int32), torch.from_numpy(theirs).view(torch.int32))


def test_working_copies_are_rounded_in_bf16_with_ties_away_from_zero_and_in_fp16_to_even() -> None:
    cases = {
        0x3F807FFF: 0x3F80,  # just below a tie
        0x3F808000: 0x3F81,  # a tie above an even pattern: torch's .to would keep 0x3F80
        0x3F818000: 0x3F82,  # a tie above an odd pattern
        0xBF808000: 0xBF81,  # away from zero, not up
        0x00008000: 0x0001,  # the smallest subnormal that is not lost
        0x7F7F8000: 0x7F80,  # beyond the largest finite bf16: infinity
        0x7F800000: 0x7F80,  # infinity
    }
    rounded = to_working(floats(*cases), torch.bfloat16).view(torch.uint16).tolist()
    assert [hex(x) for x in rounded] == [hex(x) for x in cases.values()]
    ties = torch.tensor([1 + 2**-11, 1 + 3 * 2**-11, 1e6])
    assert to_working(ties, torch.float16).tolist() == [1.0, 1 + 2**-9, math.inf]


def test_reduction_sums_in_fp32_in_rank_order_and_rounds_once() -> None:
    big, small = torch.tensor([2.0**24]), torch.tensor([1.0])
    assert reference.reduce([big, small, small, -big], torch.float32).item() == 0.0  # (2^24 + 1) + 1 stays 2^24
    assert reference.reduce([small, small, big, -big], torch.float32).item() == 0.5
    three = [torch.tensor([1.0], dtype=torch.bfloat16)] * 3
    assert reference.reduce(three, torch.float32).item() == float(np.float32(3) * np.float32(1 / 3))
    halves = [torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0**-8], dtype=torch.bfloat16)]
    assert reference.reduce(halves, torch.bfloat16).item() == 0.5  # a tie, to even


def test_norm_adds_chunks_in_rank_order_and_skips_empty_ones() -> None:
    seen: list[tuple[int, ...]] = []

    def record(chunk: Tensor) -> float:
        seen.append(tuple(chunk.shape))
        return float(chunk.numel())

    grads = {"a": torch.ones(5, 2), "b": torch.ones(1)}
    assert global_norm(grads, 4, record) == math.sqrt(11)
    assert seen == [(2, 2), (2, 2), (1, 2), (1,)]
    assert global_norm(grads, 4) == math.sqrt(11)
