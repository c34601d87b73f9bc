"""The exact exchange against a plain fp32 sum in rank order: every dtype, size and block size, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor

from dzero import PrecisionConfig, ZeroConfig
from dzero.comm import reduction
from dzero.comm.reduction import ExactReduction, NativeReduction
from dzero.zero.config import sums_exactly

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# (buffer, wire, output): gradients, payload, what is kept
DTYPES = [(FP32, FP32, FP32), (BF16, BF16, BF16), (FP16, FP16, FP16), (BF16, BF16, FP32), (FP32, BF16, FP32)]
DTYPES += [(FP32, FP16, FP32), (BF16, FP16, BF16)]
SIZES = (0, 1, 7, 256, 1001)


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def drawn(ranks: int, elems: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Every rank's tensor [elems], values over many binades, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed * 1000 + elems)
    values = torch.randn(ranks, elems, generator=generator) * torch.randn(ranks, elems, generator=generator).exp()
    return list(values.to(dtype))


def average(payloads: list[Tensor], output: torch.dtype) -> Tensor:
    """The contract, spelled out: fp32 sum in rank order, times fp32(1/N), one rounding."""
    total = payloads[0].float()
    for payload in payloads[1:]:
        total = total + payload.float()
    return (total * torch.tensor(1.0 / len(payloads))).to(output)


def check_exact(rank: int, ranks: int, sizes: tuple[int, ...] = SIZES) -> None:
    exact = ExactReduction(world())
    for (buffer, wire, kept), elems in itertools.product(DTYPES, sizes):
        full = drawn(ranks, ranks * elems, buffer)
        part = slice(rank * elems, (rank + 1) * elems)
        output = torch.empty(elems, dtype=kept)
        before = full[rank].clone()
        exact.reduce_scatter(output, full[rank], wire)
        want = average([f.to(wire)[part] for f in full], kept)
        assert torch.equal(output, want), (buffer, wire, kept, elems)
        assert torch.equal(full[rank], before)

        whole = drawn(ranks, elems, kept, seed=1)
        mine = whole[rank].clone()
        exact.all_reduce(mine, wire)
        assert torch.equal(mine, average([w.to(wire) for w in whole], kept)), (kept, wire, elems)

        gathered = torch.empty(ranks * elems, dtype=buffer)
        parts = drawn(ranks, elems, buffer, seed=2)
        for work in exact.all_gather(gathered, parts[rank]):
            work.wait()
        assert torch.equal(gathered, torch.cat(parts)), (buffer, elems)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_exact_is_the_rank_ordered_fp32_average(pool: Pool, ranks: int) -> None:
    pool.run(check_exact, ranks)


def test_exact_gives_the_same_bits_in_small_blocks(pool: Pool) -> None:
    pool.run(check_exact_in_blocks, 3)


def check_exact_in_blocks(rank: int, ranks: int) -> None:
    usual = dict(reduction.BLOCK_BYTES)
    try:
        for block_bytes in (2, 512):  # down to one element at a time
            reduction.BLOCK_BYTES["cpu"] = block_bytes
            check_exact(rank, ranks, sizes=(0, 1, 53))
    finally:
        reduction.BLOCK_BYTES.update(usual)


def staging(rank: int, ranks: int) -> list[int]:
    sizes = []
    for device in ("cpu", "cuda"):
        usual, reduction.BLOCK_BYTES["cpu"] = reduction.BLOCK_BYTES["cpu"], reduction.BLOCK_BYTES[device]
        exact = ExactReduction(world())
        for buffer, wire in ((FP32, FP32), (FP32, BF16)):
            full = torch.ones(ranks * (5 << 20), dtype=buffer)
            output = torch.empty(5 << 20, dtype=buffer)
            exact.reduce_scatter(output, full, wire)
            assert torch.equal(output, torch.ones_like(output))
        sizes.append(exact._staging.numel())
        reduction.BLOCK_BYTES["cpu"] = usual
    return sizes


def test_staging_stays_below_its_bound(pool: Pool) -> None:
    for cpu, cuda in pool.run(staging, 2):
        assert 0 < cpu <= 4 << 20
        assert 0 < cuda <= reduction.STAGING_BYTES == 32 << 20


def compare_native(rank: int, ranks: int) -> None:
    exact, native = ExactReduction(world()), NativeReduction(world())
    # fp32: ranks - 1 roundings of sums of magnitude <= sum |x|; 16 bits: each of them rounds to the wire dtype.
    for dtype, eps in ((FP32, 2.0**-24), (BF16, 2.0**-8)):
        full = drawn(ranks, ranks * 501, dtype)
        tolerance = ranks * eps * torch.stack(full).float().abs().sum(0) / ranks + 1e-30
        mine = slice(rank * 501, (rank + 1) * 501)
        a, b = torch.empty(501, dtype=dtype), torch.empty(501, dtype=dtype)
        exact.reduce_scatter(a, full[rank], dtype)
        native.reduce_scatter(b, full[rank].clone(), dtype)
        assert ((a.float() - b.float()).abs() <= tolerance[mine]).all(), dtype
        a, b = full[rank].clone(), full[rank].clone()
        exact.all_reduce(a, dtype)
        native.all_reduce(b, dtype)
        assert ((a.float() - b.float()).abs() <= tolerance).all(), dtype
        gathered = torch.empty(ranks * full[0].numel(), dtype=dtype)
        for work in native.all_gather(gathered, full[rank]):
            work.wait()
        assert torch.equal(gathered, torch.cat(full))


@pytest.mark.parametrize("ranks", [2, 4])
def test_native_agrees_with_exact_to_the_rounding_of_its_sums(pool: Pool, ranks: int) -> None:
    pool.run(compare_native, ranks)


def average_large_halves(rank: int, ranks: int) -> list[float]:
    """Of fp16 gradients whose sum is above 65,504, and whose mean is not."""
    full, output = torch.full((ranks * 8,), 40_000.0, dtype=torch.float16), torch.empty(8, dtype=torch.float16)
    NativeReduction(world()).reduce_scatter(output, full.clone(), torch.float16)
    NativeReduction(world()).all_reduce(full, torch.float16)
    return [output[0].item(), full[0].item()]


def test_native_divides_fp16_before_it_sums(pool: Pool) -> None:
    for found in pool.run(average_large_halves, 2):
        assert found == [40_000.0, 40_000.0]


def test_reduction_auto_is_exact_on_cpu_and_native_on_cuda() -> None:
    def exactly(reduction: str, device: str, reduce: str = "auto", group: int | None = None) -> bool:
        zero = ZeroConfig(reduction=reduction, node_ranks=group)
        return sums_exactly(zero, PrecisionConfig(reduce=reduce), device)

    assert exactly("auto", "cpu")
    assert not exactly("auto", "cuda")
    assert exactly("auto", "cuda", reduce="int4")
    assert exactly("auto", "cuda", group=8)
    assert exactly("exact", "cuda")
    assert not exactly("native", "cpu")
    with pytest.raises(ValueError, match=r"zero.reduction='fast': choose one of \['auto', 'exact', 'native'\]"):
        ZeroConfig(reduction="fast")
