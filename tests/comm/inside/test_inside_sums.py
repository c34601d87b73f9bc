"""Sums and gathers of ranks against their definitions in plain torch, to the bit: every dtype, route and format.

The order of a sum, its payloads in blocks, what feedback keeps, and the kernels of the host and of CUDA.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from block_cases import DTYPES as DTYPES_OF_BLOCKS
from block_cases import kernels_differ, same, through_blocks
from on_ranks import on_ranks
from pair_counter import PairCounter
from pool import Pool
from torch import Tensor

from dzero.comm import host_sum, reduction
from dzero.comm.hops import Hops
from dzero.comm.reduction import ExactReduction, NativeReduction
from dzero.comm.residuals import Residuals, residual_bytes
from dzero.comm.wire import FORMATS, Blocks, Wire

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
Format = tuple[torch.dtype, Wire, torch.dtype]
"""Of gradients, of the payload, and of what is kept."""
DTYPES: list[Format] = [
    (FP32, FP32, FP32),
    (BF16, BF16, BF16),
    (FP16, FP16, FP16),
    (BF16, BF16, FP32),
    (FP32, BF16, FP32),
]
DTYPES += [(FP32, FP16, FP32), (BF16, FP16, BF16), (FP32, FP32, BF16)]
SIZES = ((1000, False), (7, True), (257, False), (0, False), (1, False))
ELEMS = 1265


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def drawn(ranks: int, elems: int, dtype: torch.dtype = FP32, seed: int = 0, *, special: bool = False) -> list[Tensor]:
    """Every rank's tensor [elems], values over many binades, so that the order of a sum shows in its bits.

    special: among them infinities, NaN, subnormal values, and ties of bf16.
    """
    generator = torch.Generator().manual_seed(seed * 1000 + elems)
    values = torch.randn(ranks, elems, generator=generator) * torch.randn(ranks, elems, generator=generator).exp()
    if special:
        values[0, 5::97], values[-1, 6::97], values[0, 7::97] = torch.inf, -torch.inf, torch.nan
        values[:, 8::97] *= 1e-38
        values[:, 9::97] = ranks * (1 + 2.0**-8)
    return list(values.to(dtype))


def rounded(values: Tensor, blocks: Blocks) -> Tensor:
    """What a part is after it was sent in blocks, in fp32: each matrix by itself."""
    parts = values.float().split([elems for elems, _ in blocks.sizes])
    sent = zip(parts, blocks.sizes, strict=True)
    return torch.cat([part if whole else through_blocks(part, blocks.code) for part, (_, whole) in sent])


def in_hops(
    of_ranks: list[Tensor], wire: Wire, hops: Hops, left: dict[tuple[str, int], Tensor] | None = None
) -> Tensor:
    """The contract: payloads of a group are added in fp32 and rank order, then what the groups send, and the sum is
    multiplied by fp32(1/N). With feedback, what a hop sends is rounded together with what rounding left, in `left`."""

    def payload(hop: str, of: int, values: Tensor) -> Tensor:
        if not isinstance(wire, Blocks):
            return values.to(wire).float() if hop == "first" else values
        if left is None:
            return rounded(values, wire)
        wanted = left.get((hop, of), torch.zeros(ELEMS)) + values
        got = rounded(wanted, wire)
        left[hop, of] = wanted - got
        return got

    groups = []
    for first in range(0, len(of_ranks), hops.inner):
        total = payload("first", first, of_ranks[first])
        for rank in range(first + 1, first + hops.inner):
            total = total + payload("first", rank, of_ranks[rank])
        groups.append(payload("second", first, total) if hops.outer > 1 else total)
    total = groups[0]
    for group in groups[1:]:
        total = total + group
    return total * torch.tensor(1.0 / len(of_ranks))


def check_sums(rank: int, ranks: int, routes: list[Hops], formats: list[Format], sizes: tuple[int, ...]) -> None:
    for hops, (buffer, wire, kept), elems in itertools.product(routes, formats, sizes):
        exact, where = ExactReduction(world(), hops), (hops, buffer, wire, kept, elems)
        special = not isinstance(wire, Blocks)
        full = drawn(ranks, ranks * elems, buffer, special=special)
        part, before = slice(rank * elems, (rank + 1) * elems), full[rank].clone()
        output = torch.empty(elems, dtype=kept)
        exact.reduce_scatter(output, full[rank], wire)
        assert same(output, in_hops([each[part] for each in full], wire, hops).to(kept)), where
        assert same(full[rank], before), where
        if not isinstance(wire, Blocks):
            whole = drawn(ranks, elems, kept, seed=1, special=True)
            mine = whole[rank].clone()
            exact.all_reduce(mine, wire)
            assert same(mine, in_hops(whole, wire, hops).to(kept)), where
        gathered, parts = torch.empty(ranks * elems, dtype=buffer), drawn(ranks, elems, buffer, seed=2)
        for work in exact.all_gather(gathered, parts[rank]):
            work.wait()
        assert torch.equal(gathered, torch.cat(parts)), where


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("ranks", [3, 2, 4])
@on_ranks()
def test_exact_is_the_rank_ordered_fp32_average_in_pieces_of_any_size(rank: int, ranks: int) -> None:
    """In one piece, and down to one element at a time."""
    check_sums(rank, ranks, [Hops(ranks)], DTYPES, (0, 1, 7, 3 * host_sum.TILE_ELEMS + 77))
    for block_bytes in (2, 512):
        with patch.dict(reduction.BLOCK_BYTES, cpu=block_bytes):
            check_sums(rank, ranks, [Hops(ranks)], DTYPES, (0, 1, 53))


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("codes", [("int4", "int8"), ("fp8",)], ids=str)
@pytest.mark.parametrize("block_bytes", [2000, 4 << 20], ids=["in pieces", "in one piece"])
@on_ranks(4)
def test_sums_in_hops_and_blocks_are_their_definitions(
    rank: int, ranks: int, block_bytes: int, codes: tuple[str, ...]
) -> None:
    routes = [Hops(ranks), Hops(2, ranks // 2), Hops(2, ranks // 2, nodes=True)]
    blocks: list[Format] = [(dtype, Blocks(SIZES, code), dtype) for dtype in (BF16, FP32) for code in codes]
    with patch.dict(reduction.BLOCK_BYTES, cpu=block_bytes):
        check_sums(rank, ranks, routes, [(FP32, FP32, FP32), (FP32, BF16, BF16)], (0, 1, ranks + 1, 501))
        check_sums(rank, ranks, routes, blocks, (ELEMS,))


def staging(rank: int, ranks: int) -> list[int]:
    """Bytes that sums of 5 Mi elements hold besides, in pieces as on the CPU and as on CUDA."""
    sizes = []
    for block_bytes in (reduction.BLOCK_BYTES["cpu"], reduction.BLOCK_BYTES["cuda"]):
        exact = ExactReduction(world())
        with patch.dict(reduction.BLOCK_BYTES, cpu=block_bytes):
            for buffer, wire in ((FP32, FP32), (FP32, BF16)):
                output = torch.empty(5 << 20, dtype=buffer)
                exact.reduce_scatter(output, torch.ones(ranks * (5 << 20), dtype=buffer), wire)
                assert torch.equal(output, torch.ones_like(output))
        sizes.append(exact._staging.numel())
    return sizes


def test_staging_stays_below_its_bound(pool: Pool) -> None:
    for cpu, cuda in pool.run(staging, 2):
        assert 0 < cpu <= 4 << 20
        assert 0 < cuda <= reduction.STAGING_BYTES == 32 << 20


def average_large_halves(rank: int, ranks: int) -> list[float]:
    """Of fp16 gradients whose sum is above 65,504, and whose mean is not."""
    full, output = torch.full((ranks * 8,), 40_000.0, dtype=torch.float16), torch.empty(8, dtype=torch.float16)
    NativeReduction(world()).reduce_scatter(output, full.clone(), torch.float16)
    NativeReduction(world()).all_reduce(full, torch.float16)
    return [output[0].item(), full[0].item()]


def test_native_divides_fp16_before_it_sums(pool: Pool) -> None:
    for found in pool.run(average_large_halves, 2):
        assert found == [40_000.0, 40_000.0]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("code", ["int4", *(code for code in FORMATS if code != "int4")])
@on_ranks(4)
def test_feedback_adds_what_rounding_left_to_the_next_payload(rank: int, ranks: int, code: str) -> None:
    """To the bit; sums over many steps stay near the truth, and an overflow is forgotten."""
    mine = slice(rank * ELEMS, (rank + 1) * ELEMS)
    for hops in (Hops(ranks), Hops(2, ranks // 2)):
        exact, wire, output = ExactReduction(world(), hops), Blocks(SIZES, code), torch.empty(ELEMS)
        residuals, left = Residuals.zeros(hops, ELEMS, torch.device("cpu")), dict[tuple[str, int], Tensor]()
        assert residuals.first.nbytes + residuals.second.nbytes == residual_bytes(hops, ELEMS)
        full = drawn(ranks, ranks * ELEMS)
        for step in range(3):
            of_step = [each.roll(step) for each in full]
            exact.reduce_scatter(output, of_step[rank], wire, residuals)
            assert torch.equal(output, in_hops([each[mine] for each in of_step], wire, hops, left)), (code, hops, step)
        mean, sums = torch.stack(full).mean(0)[mine], [torch.zeros(ELEMS) for _ in range(2)]
        for _ in range(30):
            for total, added in zip(sums, (residuals, None), strict=True):
                exact.reduce_scatter(output, full[rank], wire, added)
                total += output
        with_it, without = ((total - 30 * mean).abs().max() for total in sums)
        assert with_it < without / 5, (code, hops)
        full[0][::ELEMS] = torch.inf  # in the first block of every part
        exact.reduce_scatter(output, full[rank], wire, residuals)
        assert output.isnan().any()
        exact.reduce_scatter(output, torch.ones(ranks * ELEMS), wire, residuals)
        assert output.isfinite().all()


@pytest.mark.parametrize("code", FORMATS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_a_payload_decodes_to_the_nearest_levels_of_its_blocks(code: str, dtype: torch.dtype) -> None:
    blocks, values = Blocks(SIZES, code), drawn(1, ELEMS)[0].to(dtype)
    row, got = torch.full((blocks.nbytes,), 255, dtype=torch.uint8), torch.empty(ELEMS, dtype=dtype)
    blocks.encode(values, row)
    blocks.decode(row, got)
    assert torch.equal(got, rounded(values, blocks).to(dtype))
    total = torch.ones(ELEMS)
    blocks.add(row, total)
    assert torch.equal(total, 1 + rounded(values, blocks))
    scales, codes = 4 * (4 + 2 + 1), 1258 * FORMATS[code] // 8 + (code == "int4")  # two odd sizes end in half a byte
    assert blocks.nbytes == scales + 4 * 7 + -(-codes // 4) * 4


@pytest.mark.parametrize("code", FORMATS)
def test_what_is_not_finite_or_tiny_stays_so_in_its_block_alone(code: str) -> None:
    blocks = Blocks(((1024, False),), code)
    values = torch.ones(1024)
    values[3], values[300], values[512:768] = float("inf"), float("nan"), 1e-38
    row, got = torch.empty(blocks.nbytes, dtype=torch.uint8), torch.empty(1024)
    blocks.encode(values, row)
    blocks.decode(row, got)
    assert got[:512].isnan().all()
    assert torch.equal(got[512:], torch.cat([torch.zeros(256), torch.ones(256)]))


def crossing(rank: int, ranks: int, hops: Hops) -> list[int]:
    """Bytes that a gather and a sum of 64 fp32 per rank send to other groups of two ranks, and to the other rank."""
    exact, sent = ExactReduction(world(), hops), PairCounter()
    with sent:
        for work in exact.all_gather(torch.empty(ranks * 64), torch.ones(64)):
            work.wait()
        exact.reduce_scatter(torch.empty(64), torch.ones(ranks * 64), FP32)
    return [sent.across(2), sent.total - sent.across(2)]


def test_between_nodes_a_part_travels_once(pool: Pool) -> None:
    part = 64 * 4
    for found in pool.run(crossing, 4, Hops(4)):
        assert found == [2 * part + 2 * part, part + part]
    for found in pool.run(crossing, 4, Hops(2, 2, nodes=True)):
        assert found == [part + part, 2 * part + 2 * part]


def test_the_kernels_of_cuda_have_the_bits_of_those_of_the_cpu(interpreted: Callable[..., Any]) -> None:
    cases = [(code, dtype) for code in FORMATS for dtype in DTYPES_OF_BLOCKS]
    assert {case: interpreted(kernels_differ, "cpu", *case) for case in cases} == {case: [] for case in cases}
