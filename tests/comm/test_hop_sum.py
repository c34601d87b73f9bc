"""Sums in two hops and in blocks, and gathers in two hops, against their definitions in plain torch, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from pair_counter import PairCounter
from pool import Pool
from torch import Tensor

from dzero.comm import reduction
from dzero.comm.hops import Hops
from dzero.comm.reduction import ExactReduction
from dzero.comm.residuals import Residuals, residual_bytes
from dzero.comm.wire import FORMATS, Blocks, Wire

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = ((1000, False), (7, True), (257, False), (0, False), (1, False))
ELEMS = 1265


def rounded(values: Tensor, blocks: Blocks) -> Tensor:
    """What a part is after it was sent in blocks, in fp32: each matrix by itself, 256 elements at a time."""
    parts, most = [], torch.tensor(2.0 ** (blocks.bits - 1) - 1)
    for part, (_, whole) in zip(values.float().split([elems for elems, _ in blocks.sizes]), blocks.sizes, strict=True):
        pieces = (part,) if whole or not len(part) else part.split(256)
        for piece in pieces:
            largest = piece.abs().max() if len(piece) else torch.tensor(0.0)
            if whole or not len(piece):
                parts.append(piece)
            elif blocks.code == "fp8":
                parts.append(as_float8(piece, largest))
            else:
                parts.append(torch.round(piece * (most / largest)) * (largest / most))
    return torch.cat(parts)


def as_float8(piece: Tensor, largest: Tensor) -> Tensor:
    """By torch's own cast, of the values over the smallest power of two that keeps them below 448."""
    scale = torch.exp2(torch.ceil(torch.log2(largest.double() / 448)))
    return (piece.double() / scale).float().to(torch.float8_e4m3fn).float() * scale.float()


def sent(values: Tensor, wire: Wire) -> Tensor:
    return rounded(values, wire) if isinstance(wire, Blocks) else values.to(wire).float()


def in_hops(of_ranks: list[Tensor], wire: Wire, hops: Hops) -> Tensor:
    """The contract: payloads of a group are added in rank order, then what the groups send, and the sum is divided."""
    groups = []
    for first in range(0, len(of_ranks), hops.inner):
        total = sent(of_ranks[first], wire)
        for values in of_ranks[first + 1 : first + hops.inner]:
            total = total + sent(values, wire)
        groups.append(sent(total, wire) if hops.outer > 1 and isinstance(wire, Blocks) else total)
    total = groups[0]
    for group in groups[1:]:
        total = total + group
    return total * torch.tensor(1.0 / len(of_ranks))


def drawn(ranks: int, elems: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(elems)
    return [
        torch.randn(elems, generator=generator) * torch.randn(elems, generator=generator).exp() for _ in range(ranks)
    ]


def check(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    usual = dict(reduction.BLOCK_BYTES)
    mine = slice(rank * ELEMS, (rank + 1) * ELEMS)
    try:
        routes = (Hops(ranks), Hops(2, ranks // 2), Hops(2, ranks // 2, nodes=True))
        for block_bytes, hops in itertools.product((4 << 20, 2000), routes):  # one piece, and many
            reduction.BLOCK_BYTES["cpu"] = block_bytes
            exact = ExactReduction(group, hops)
            for wire, buffer, kept in (
                (FP32, FP32, FP32),
                (BF16, FP32, BF16),
                (Blocks(SIZES, "int8"), FP32, FP32),
                (Blocks(SIZES, "fp8"), FP32, FP32),
                (Blocks(SIZES, "int4"), BF16, BF16),
                (Blocks(SIZES, "int4"), FP16, FP16),
            ):
                full = [each.to(buffer) for each in drawn(ranks, ranks * ELEMS)]
                output = torch.empty(ELEMS, dtype=kept)
                exact.reduce_scatter(output, full[rank], wire)
                want = in_hops([each[mine] for each in full], wire, hops).to(kept)
                assert torch.equal(output, want), (wire, hops, block_bytes)
            for elems in (0, 1, ranks + 1, 501):
                every = drawn(ranks, elems)
                whole = every[rank].clone()
                exact.all_reduce(whole, FP32)
                assert torch.equal(whole, in_hops(every, FP32, hops)), (elems, hops)
            gathered, parts = torch.empty(ranks * 77), drawn(ranks, 77)
            for work in exact.all_gather(gathered, parts[rank]):
                work.wait()
            assert torch.equal(gathered, torch.cat(parts))
    finally:
        reduction.BLOCK_BYTES.update(usual)


def test_sums_in_hops_and_blocks_are_their_definitions(pool: Pool) -> None:
    pool.run(check, 4)


def by_hand(of_ranks: list[Tensor], wire: Blocks, hops: Hops, left: dict[tuple[str, int], Tensor]) -> Tensor:
    """The contract of feedback: what a hop sends is rounded together with what rounding left, in `left`, before."""

    def payload(hop: str, of: int, values: Tensor) -> Tensor:
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


def check_feedback(rank: int, ranks: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    mine = slice(rank * ELEMS, (rank + 1) * ELEMS)
    for code, hops in itertools.product(FORMATS, (Hops(ranks), Hops(2, ranks // 2))):
        exact, wire, output = ExactReduction(group, hops), Blocks(SIZES, code), torch.empty(ELEMS)
        residuals, left = Residuals.zeros(hops, ELEMS, torch.device("cpu")), dict[tuple[str, int], Tensor]()
        assert residuals.first.nbytes + residuals.second.nbytes == residual_bytes(hops, ELEMS)
        full = drawn(ranks, ranks * ELEMS)
        for step in range(3):
            of_step = [each.roll(step) for each in full]
            exact.reduce_scatter(output, of_step[rank], wire, residuals)
            assert torch.equal(output, by_hand([each[mine] for each in of_step], wire, hops, left)), (code, hops, step)
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


def test_feedback_adds_what_rounding_left_to_the_next_payload(pool: Pool) -> None:
    """To the bit; sums over many steps stay near the truth, and an overflow is forgotten."""
    pool.run(check_feedback, 4)


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


@pytest.mark.parametrize(
    ("ranks", "inner", "hops"),
    [
        (1, None, (1, 1)),
        (63, None, (63, 1)),
        (64, None, (8, 8)),
        (96, None, (12, 8)),
        (67, None, (67, 1)),
        (1024, None, (32, 32)),
        (16, 8, (8, 2)),
        (1024, 8, (8, 128)),
    ],
)
def test_the_route_follows_from_the_numbers_of_ranks(ranks: int, inner: int | None, hops: tuple[int, int]) -> None:
    assert Hops.of(ranks, inner) == Hops(*hops, nodes=inner is not None)


def crossing(rank: int, ranks: int, hops: Hops) -> list[int]:
    """Bytes that a gather and a sum of 64 fp32 per rank send to other groups of two ranks, and to the other rank."""
    group = dist.group.WORLD
    assert group is not None
    exact, sent = ExactReduction(group, hops), PairCounter()
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
