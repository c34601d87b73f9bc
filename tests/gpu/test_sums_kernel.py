"""Sums of squares on a GPU: the bits of the CPU kernel, on any stream, without waiting. Run with `pytest -m gpu`.

tests/optim/inside/test_inside_cuda.py interprets the kernels on the CPU and counts instructions of their machine code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sums_cases import DTYPES, LONG, SIZES, gradient, gradients, same_bits

from dzero.optim import cpu_kernels
from dzero.optim.cpu_kernels import CHUNK_ELEMS
from dzero.optim.cuda_sums import BLOCK_CHUNKS, CudaSums
from dzero.optim.grad_sums import SquareSums, sum_squares

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: `pytest -m gpu` asks for one"),
]
GPU = torch.device("cuda")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let torch refuse what makes the host wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gpu_has_the_bits_of_the_cpu_kernel(dtype: torch.dtype) -> None:
    grads = gradients(dtype, (*SIZES, *LONG, 3 * CHUNK_ELEMS + 5))
    assert same_bits(sum_squares([grad.to(GPU) for grad in grads]), cpu_kernels.sum_squares(grads))


def test_more_chunks_than_are_added_at_once_are_added_in_order() -> None:
    grads = [gradient(BLOCK_CHUNKS * CHUNK_ELEMS + 300, torch.bfloat16), gradient(1000, torch.bfloat16)]
    assert same_bits(sum_squares([grad.to(GPU) for grad in grads]), cpu_kernels.sum_squares(grads))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_gradients_have_the_same_sums(dtype: torch.dtype) -> None:
    grads = gradients(dtype)
    shifted = [torch.empty(grad.numel() + 1, dtype=dtype, device=GPU)[1:].copy_(grad) for grad in grads]
    assert same_bits(sum_squares(shifted), cpu_kernels.sum_squares(grads))


def test_a_host_that_runs_ahead_changes_no_bit_and_torch_sees_it_wait_for_nothing() -> None:
    """Gradients of 20 steps lie at other addresses each, and the device is late by about 0.1 s.

    Only the ring of pinned buffers lets the host wait, for a copy of two steps before; torch does not count that.
    """
    steps = [[gradient(size, torch.float32, step) for size in (*SIZES, 20_000)] for step in range(20)]
    on_gpu, sums = [[grad.to(GPU) for grad in grads] for grads in steps], CudaSums()
    sums.sum_squares(on_gpu[0])  # compiles, and makes the table
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    with no_waiting():
        found = [sums.sum_squares(grads) for grads in on_gpu]
    for ours, grads in zip(found, steps, strict=True):
        assert same_bits(ours, cpu_kernels.sum_squares(grads))


def test_another_stream_takes_over_and_tables_may_be_dropped() -> None:
    grads = [[gradient(size, torch.float32, step) for size in SIZES] for step in range(2)]
    on_gpu, sums, side = [[grad.to(GPU) for grad in each] for each in grads], CudaSums(), torch.cuda.Stream()
    sums.sum_squares(on_gpu[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    first = sums.sum_squares(on_gpu[0])
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        second = sums.sum_squares(on_gpu[1])
    del sums
    scribbles = [torch.full((1 << 10,), -1, device=GPU) for _ in range(100)]  # into the memory of what was freed
    torch.cuda.synchronize()
    assert len(scribbles) == 100
    assert same_bits(first, cpu_kernels.sum_squares(grads[0]))
    assert same_bits(second, cpu_kernels.sum_squares(grads[1]))


def test_sums_are_found_on_the_device_by_name() -> None:
    grads = {"a": gradient(300, torch.bfloat16), "b": gradient(5000, torch.bfloat16)}
    sums = SquareSums(["b", "other", "a"], GPU)
    sums.find({name: grad.to(GPU) for name, grad in grads.items()})
    a, b = cpu_kernels.sum_squares([*grads.values()]).tolist()
    assert sums.values[0].tolist() == [b, 0.0, a]
