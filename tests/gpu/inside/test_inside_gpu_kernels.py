"""Kernels and attention on a GPU against those of the CPU, and against formulas. Run with `pytest -m gpu`.

updates            tests/optim interprets the kernel on the CPU and counts the instructions of its machine code;
                   launches, pinned copies, streams, and how division and square root round are seen here only
sums of squares    the same: on any stream, without waiting
blocks             payloads have the bits of the CPU kernels
attention          over a prefix, and in a ring of one, against attention written out
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import block_cases
import numpy as np
import pytest
import sums_cases
import torch
import torch.distributed as dist
import torch.nn.functional as F
from adamw_cases import KINDS, Param, by_operations, columns, differences, kernel_differs, params, table_of
from recorded import off
from sums_cases import LONG, SIZES, gradient, gradients, same_bits
from torch import nn
from training_loops import whole

from dzero import AdamW, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard
from dzero.comm.context_exchange import ContextExchange
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import NativeReduction
from dzero.comm.wire import FORMATS, Blocks
from dzero.optim import adamw_math, cpu_kernels, flat_update
from dzero.optim.cpu_kernels import CHUNK_ELEMS
from dzero.optim.cuda_sums import BLOCK_CHUNKS, CudaSums
from dzero.optim.grad_sums import SquareSums, sum_squares
from dzero.parallel.context.attention import TILE_TOKENS, Masks, over_prefix
from dzero.parallel.context.ring import Ring
from dzero.zero.rounding import split, to_working

pytestmark = pytest.mark.gpu
CPU, GPU = torch.device("cpu"), torch.device("cuda")

# ---- update


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_has_the_bits_of_the_cpu_kernels(kind: str) -> None:
    assert kernel_differs(kind, "cuda") == []


def on_both(before: Iterable[Param]) -> tuple[list[Param], list[Param]]:
    """The same parameters on the GPU and on the CPU."""
    given = [*before]
    return [each.to(GPU) for each in given], [each.to(CPU) for each in given]


def be_late() -> None:
    """Let the device begin about 0.1 s or more after what is launched from here on."""
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)


def have_bits_of_the_cpu(ours: list[Param], want: list[Param], steps: Iterable[int]) -> None:
    for step, each in itertools.product(steps, want):
        by_operations(each, step)
    assert differences(ours, want) == []


@pytest.mark.parametrize("kind", KINDS)
def test_unaligned_gradients_are_updated_to_the_same_bits(kind: str) -> None:
    ours, want = on_both(params(kind))
    for each in ours:
        each.grad = torch.empty(each.grad.numel() + 1, dtype=each.grad.dtype, device=GPU)[1:].copy_(each.grad)
    table_of(ours).update(*columns(ours, 3))
    have_bits_of_the_cpu(ours, want, [3])


def test_a_host_that_runs_ahead_changes_no_bit_of_updates() -> None:
    """20 steps are enqueued behind other work, with other coefficients and seeds in each."""
    ours, want = on_both(each for kind in KINDS for each in params(kind))
    table, steps = table_of(ours), range(1, 21)
    arguments = [columns(ours, step) for step in steps]
    be_late()
    for each in arguments:
        table.update(*each)
    have_bits_of_the_cpu(ours, want, steps)


def test_another_stream_takes_over_behind_the_launches_of_the_one_before() -> None:
    ours, want = on_both(each for kind in KINDS for each in params(kind))
    table, first, second = table_of(ours), columns(ours, 1), columns(ours, 2)
    side = torch.cuda.Stream()
    be_late()
    table.update(*first)
    with torch.cuda.stream(side):
        table.update(*second)
    torch.cuda.synchronize()
    have_bits_of_the_cpu(ours, want, [1, 2])


def test_random_patterns_over_all_binades_have_the_bits_of_the_cpu() -> None:
    """A million fp32 values of any exponent in each operand of the division and under the square root."""
    generator, elems = torch.Generator().manual_seed(0), 1 << 20
    p = next(each for each in params("fp32") if each.work.numel() == 1)

    def any_binade(low: int, high: int) -> torch.Tensor:
        sign = torch.randint(0, 2, (elems,), generator=generator).float() * 2 - 1
        size = 1 + torch.rand(elems, generator=generator)
        return sign * size * 2.0 ** torch.randint(low, high, (elems,), generator=generator)

    p.work = p.master = any_binade(-126, 60)
    p.m, p.v, p.grad = any_binade(-149, 60), any_binade(-149, 120).abs(), torch.zeros(elems)
    ours, want = on_both([p])
    table_of(ours).update(*columns(ours, 3))
    have_bits_of_the_cpu(ours, want, [3])
    assert np.isfinite(want[0].work.numpy()).all()


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_the_update_on_a_gpu_is_slice_invariant_and_has_the_bits_of_the_cpu(moments: torch.dtype) -> None:
    length = 100_003
    master = torch.randn(length)
    work, low = to_working(master, torch.bfloat16), split(master)[1]
    m, v = torch.zeros(2, length, dtype=moments)
    grad = torch.randn(length).bfloat16()
    c = adamw_math.Coefficients.of(step=1, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, scale=0.5)
    states = flat_update.ParamStates("w", 0, work, None, low, m, v)
    keys = ("work", "remainder", "m", "v")

    def run(cut: int, device: str) -> flat_update.ParamStates:
        own = replace(states, **{key: getattr(states, key).to(device, copy=True) for key in keys})
        for piece in flat_update.ParamUpdate(own, grad.to(device), c, 1).chunks(cut):
            flat_update.AdamWUpdater(threads=1).run([piece])
        return own

    once, cut, host = run(length, "cuda"), run(33_331, "cuda"), run(length, "cpu")
    for key in keys:
        assert torch.equal(getattr(once, key), getattr(cut, key))
        assert torch.equal(getattr(once, key).cpu(), getattr(host, key))


# ---- sums of squares


@contextmanager
def no_waiting() -> Iterator[None]:
    """Let torch refuse what makes the host wait for the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@pytest.mark.parametrize("dtype", sums_cases.DTYPES, ids=str)
def test_sums_have_the_bits_of_the_cpu_kernel(dtype: torch.dtype) -> None:
    grads = gradients(dtype, (*SIZES, *LONG, 3 * CHUNK_ELEMS + 5))
    assert same_bits(sum_squares([grad.to(GPU) for grad in grads]), cpu_kernels.sum_squares(grads))


def test_more_chunks_than_are_added_at_once_are_added_in_order() -> None:
    grads = [gradient(BLOCK_CHUNKS * CHUNK_ELEMS + 300, torch.bfloat16), gradient(1000, torch.bfloat16)]
    assert same_bits(sum_squares([grad.to(GPU) for grad in grads]), cpu_kernels.sum_squares(grads))


@pytest.mark.parametrize("dtype", sums_cases.DTYPES, ids=str)
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
    be_late()
    with no_waiting():
        found = [sums.sum_squares(grads) for grads in on_gpu]
    for ours, grads in zip(found, steps, strict=True):
        assert same_bits(ours, cpu_kernels.sum_squares(grads))


def test_another_stream_takes_over_and_tables_may_be_dropped() -> None:
    grads = [[gradient(size, torch.float32, step) for size in SIZES] for step in range(2)]
    on_gpu, sums, side = [[grad.to(GPU) for grad in each] for each in grads], CudaSums(), torch.cuda.Stream()
    sums.sum_squares(on_gpu[0])
    be_late()
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


# ---- payloads in blocks


@pytest.mark.parametrize("code", FORMATS)
@pytest.mark.parametrize("dtype", block_cases.DTYPES, ids=str)
def test_payloads_in_blocks_have_the_bits_of_the_cpu_kernels(code: str, dtype: torch.dtype) -> None:
    assert block_cases.kernels_differ("cuda", code, dtype) == []


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("code", ["fp8", "int8", "int4"])
def test_parameters_that_come_in_blocks_are_rounded_as_on_a_cpu(code: str) -> None:
    layers, width = 4, 96
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    how = {"precision": PrecisionConfig(fetch=code), "offload": OffloadConfig(**off("host"))}
    sharded = shard(model, ZeroConfig(stage=3), mesh=make_mesh("cuda"), **how)
    optim = AdamW(sharded, lr=1e-3)
    seen: dict[str, torch.Tensor] = {}
    for at, layer in enumerate(model):

        def see(made: nn.Module, _: object, name: str = f"{at}.weight") -> None:
            seen[name] = made.weight.detach().clone()

        layer.register_forward_pre_hook(see)
    batch = torch.randn(16, width, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):
        sharded.model(batch).float().square().mean().backward()
        optim.step()
    with torch.no_grad():
        sharded.model(batch)
    for name, param in sharded.named_params().items():
        if name in seen:
            want = whole(param).detach().cpu().flatten()
            blocks = Blocks(((want.numel(), False),), code)
            row = torch.empty(blocks.nbytes, dtype=torch.uint8)
            blocks.encode(want, row)
            blocks.decode(row, want)
            assert torch.equal(seen[name].cpu().flatten(), want), name
    assert len(seen) == layers


# ---- attention


def close(pairs: Iterable[tuple[Any, Any]], allowed: float) -> None:
    for made, plain in pairs:
        assert (made.double() - plain.double()).norm() < allowed * plain.double().norm()


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("dtype", "dim", "allowed"), [(torch.bfloat16, 64, 2e-2), (torch.bfloat16, 12, 2e-2), (torch.float32, 64, 1e-3)]
)
def test_a_chunk_sees_the_keys_up_to_its_own_end(dtype: torch.dtype, dim: int, allowed: float, kv_heads: int) -> None:
    """Forward and backward, against attention written out; in bf16 within what bf16 can hold."""
    time, length = TILE_TOKENS + 64, 3 * TILE_TOKENS
    sizes = ((2, 8, time, dim), (2, kv_heads, length, dim), (2, kv_heads, length, dim))
    given = [torch.randn(size, device="cuda", dtype=dtype, requires_grad=True) for size in sizes]
    grad = torch.randn(sizes[0], device="cuda", dtype=dtype)
    masks = Masks()
    masks.tokens = length + TILE_TOKENS
    got = torch.cat([*over_prefix(given[0], given[1], given[2], masks)], dim=2)
    got.backward(grad)

    query, key, value = (each.detach().double().requires_grad_() for each in given)
    keys, values = (each.repeat_interleave(8 // kv_heads, dim=1) for each in (key, value))
    later = torch.ones(time, length, device="cuda", dtype=torch.bool).triu(length - time + 1)
    scores = (query @ keys.transpose(2, 3) / dim**0.5).masked_fill(later, -torch.inf)
    want = scores.softmax(-1) @ values
    want.backward(grad.double())
    close([(got, want), *((a.grad, b.grad) for a, b in zip(given, (query, key, value), strict=True))], allowed)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_ring_of_one_is_causal_attention(kv_heads: int) -> None:
    """Forward and backward in bf16, within what bf16 can hold."""
    group = dist.group.WORLD
    assert group is not None
    sizes = ((2, 8, 256, 64), (2, kv_heads, 256, 64), (2, kv_heads, 256, 64))
    given = [torch.randn(size, device=GPU, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    grad = torch.randn(sizes[0], device=GPU, dtype=torch.bfloat16)
    got = Ring(ContextExchange(NativeReduction(group), 0, "cp", Ledger()))(*given)
    got.backward(grad)
    plain = [each.detach().clone().requires_grad_() for each in given]
    want = F.scaled_dot_product_attention(*plain, is_causal=True, enable_gqa=kv_heads < 8)
    want.backward(grad)
    close([(got, want), *((a.grad, b.grad) for a, b in zip(given, plain, strict=True))], 2e-2)
