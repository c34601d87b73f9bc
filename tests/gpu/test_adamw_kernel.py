"""The update's kernel on a GPU: the bits of the CPU kernels. Run with `pytest -m gpu`.

tests/optim/inside/test_inside_cuda.py interprets the kernel on the CPU and counts the instructions of its machine code.
Launches, pinned copies, streams, and how division and square root round in silicon are seen here only.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from adamw_cases import KINDS, by_operations, columns, differences, kernel_differs, params, table_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: `pytest -m gpu` asks for one"),
]
CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_the_gpu_has_the_bits_of_the_cpu_kernels(kind: str) -> None:
    assert kernel_differs(kind, "cuda") == []


@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_gradients_are_updated_to_the_same_bits(kind: str) -> None:
    before = list(params(kind))
    ours, want = [each.to(GPU) for each in before], [each.to(CPU) for each in before]
    for each in ours:
        each.grad = torch.empty(each.grad.numel() + 1, dtype=each.grad.dtype, device=GPU)[1:].copy_(each.grad)
    table_of(ours).update(*columns(ours, 3))
    for each in want:
        by_operations(each, 3)
    assert differences(ours, want) == []


def test_a_host_that_runs_ahead_changes_no_bit() -> None:
    """20 steps are enqueued behind work of about 0.1 s or more, with other coefficients and seeds in each."""
    before = [each for kind in KINDS for each in params(kind)]
    ours, want = [each.to(GPU) for each in before], [each.to(CPU) for each in before]
    table, steps = table_of(ours), range(1, 21)
    arguments = [columns(ours, step) for step in steps]
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for each in arguments:
        table.update(*each)
    for step, each in itertools.product(steps, want):
        by_operations(each, step)
    assert differences(ours, want) == []


def test_another_stream_takes_over_behind_the_launches_of_the_one_before() -> None:
    before = [each for kind in KINDS for each in params(kind)]
    ours, want = [each.to(GPU) for each in before], [each.to(CPU) for each in before]
    table, side = table_of(ours), torch.cuda.Stream()
    first, second = columns(ours, 1), columns(ours, 2)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    table.update(*first)
    with torch.cuda.stream(side):
        table.update(*second)
    torch.cuda.synchronize()
    for step, each in itertools.product((1, 2), want):
        by_operations(each, step)
    assert differences(ours, want) == []


def test_random_patterns_over_all_binades_have_the_bits_of_the_cpu() -> None:
    """A million fp32 values of any exponent in each operand of the division and under the square root."""
    generator = torch.Generator().manual_seed(0)
    elems = 1 << 20
    [p] = [each for each in params("fp32") if each.work.numel() == 1][:1]

    def any_binade(low: int, high: int) -> torch.Tensor:
        sign = torch.randint(0, 2, (elems,), generator=generator).float() * 2 - 1
        return (
            sign
            * (1 + torch.rand(elems, generator=generator))
            * 2.0 ** torch.randint(low, high, (elems,), generator=generator)
        )

    work = any_binade(-126, 60)
    p.work, p.master, p.m, p.v, p.grad = (
        work,
        work,
        any_binade(-149, 60),
        any_binade(-149, 120).abs(),
        torch.zeros(elems),
    )
    ours, want = p.to(GPU), p.to(CPU)
    table_of([ours]).update(*columns([ours], 3))
    by_operations(want, 3)
    assert np.isfinite(want.work.numpy()).all()
    assert differences([ours], [want]) == []
