"""Sums of squares are added over all ranks in one order, to the bit, and no rank moves what all ranks have found."""

from __future__ import annotations

import math

import pytest
import torch
from pool import Pool

from dzero import make_mesh
from dzero.comm.ledger import Entry, Ledger, Traffic
from dzero.estimate.fake_group import fake_group
from dzero.optim.grad_norm import DataParallelSums

MESHES = [(1, 2), (1, 1), (1, 3), (2, 2), (2, 1), (4, 1), (3, 1), (1, 4)]
"""(copies, shards)"""
PARAMS = [1, 2, 3, 5, 7, 8, 41]


def found_by(rank: int, params: int) -> list[float]:
    """Sums of many magnitudes, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(1000 * params + rank)
    exponents = torch.rand(params, generator=generator, dtype=torch.float64) * 12
    return (10**exponents).tolist()


def added(order: list[int], params: int) -> list[float]:
    """What those ranks found, added one after the other in Python."""
    totals = [0.0] * params
    for rank in order:
        totals = [total + each for total, each in zip(totals, found_by(rank, params), strict=True)]
    return totals


def in_order(copies: int, shards: int) -> list[int]:
    """Global ranks, of which `shards` neighbours hold one copy: the first shard of all copies first."""
    return [copy * shards + shard for shard in range(shards) for copy in range(copies)]


def always(params: int, ranks: int) -> bool:
    return True


def add(rank: int, ranks: int, copies: int) -> list[tuple[bool, int, list[float], dict[Entry, Traffic]]]:
    """Totals and traffic by number of parameters, without and with slices."""
    told = []
    for sliced in (False, True):
        mesh, ledger = make_mesh("cpu", replicate=copies), Ledger()
        sums = DataParallelSums(mesh, ledger, always) if sliced else DataParallelSums(mesh, ledger)
        for params in PARAMS:
            own = torch.tensor(found_by(rank, params), dtype=torch.float64)
            totals, edited = sums.add(own, 7, is_edited=rank == 1)
            assert edited is (ranks > 1)  # on every rank, where one says so
            told.append((sliced, params, totals.tolist(), ledger.take()))
    return told


def gathered(copies: int, shards: int, params: int) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends, by hand: its checksum and sums to the copies, and those of all copies to the shards."""
    sent = {"replicate": (copies - 1) * (1 + params) * 8, "shard": (shards - 1) * copies * (1 + params) * 8}
    return {("all_gather", axis): count for axis, count in sent.items() if count}


def moved(copies: int, shards: int, params: int) -> dict[tuple[str, str], int]:
    """Bytes that a rank sends, by hand: slices of w fp64 sums behind a checksum each, and w totals back."""
    w = math.ceil(params / (copies * shards))
    sent = {
        ("all_gather", "replicate"): (copies - 1) * shards * w * 8,
        ("all_gather", "shard"): (shards - 1) * w * 8,
        ("all_to_all", "replicate"): (copies - 1) * shards * (w + 1) * 8,
        ("all_to_all", "shard"): (shards - 1) * copies * (w + 1) * 8,
    }
    return {entry: count for entry, count in sent.items() if count}


def booked(traffic: dict[Entry, Traffic]) -> dict[tuple[str, str], int]:
    assert all(entry.phase == "control" and entry.dtype == "float64" for entry in traffic)
    assert all(each.calls == 1 for each in traffic.values())
    return {(entry.kind, entry.axis): each.sent_bytes for entry, each in traffic.items()}


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("copies", "shards"), MESHES)
def test_every_rank_has_the_sums_of_all_added_in_rank_order_to_the_bit(pool: Pool, copies: int, shards: int) -> None:
    for told in pool.run(add, copies * shards, copies):
        for sliced, params, totals, traffic in told:
            assert totals == added(in_order(copies, shards), params)
            assert booked(traffic) == (moved if sliced else gathered)(copies, shards, params)
            assert (traffic == {}) is (copies * shards == 1)


def test_another_order_would_have_other_bits() -> None:
    """So the test above tells the shards' order from that of the ranks, and from sums of each axis's sums."""
    assert added(in_order(2, 2), 41) != added([0, 1, 2, 3], 41)
    by_shard = [added([0, 2], 41), added([1, 3], 41)]
    assert added(in_order(2, 2), 41) != [a + b for a, b in zip(*by_shard, strict=True)]


def astray(rank: int, _: int, others: list[int]) -> tuple[str, dict[tuple[str, str], int]]:
    """What is said where those ranks of 2 x 2 have run something else, and what was sent until then."""
    ledger = Ledger()
    sums = DataParallelSums(make_mesh("cpu", replicate=2), ledger, always)
    ledger.collective_log.note("the same")
    ledger.collective_log.note("other" if rank in others else "one")
    with pytest.raises(RuntimeError) as refused:
        sums.add(torch.ones(2, dtype=torch.float64), ledger.collective_log.checksum)
    return str(refused.value), booked(ledger.take())


@pytest.mark.full(
    "tests/optim/test_misuse.py::test_ranks_that_run_units_in_different_orders_are_refused_and_both_orders_told"
)
@pytest.mark.parametrize("others", [[3], [1, 2], [2, 3]])
def test_ranks_that_ran_something_else_are_named_before_totals_travel(pool: Pool, others: list[int]) -> None:
    due = {entry: count for entry, count in moved(2, 2, 2).items() if entry[0] == "all_to_all"}
    told = pool.run(astray, 4, others)
    for words, sent in told:
        assert f"ranks {others} ran the model's units in another order than rank 0" in words
        assert sent == due
    assert any(f"rank {others[0]}: other" in words for words, _ in told)


@pytest.mark.parametrize(("copies", "shards"), [(1, 16_384), (16_384, 1), (8, 2048)])
def test_one_of_16384_ranks_sends_kilobytes(copies: int, shards: int) -> None:
    """Of 724 parameters. A gather of all sums and checksums would send 95 MB."""
    ranks, params = copies * shards, 724
    with fake_group(ranks, rank=1):
        ledger = Ledger()
        sums = DataParallelSums(make_mesh("cpu", replicate=copies), ledger)
        assert sums.add(torch.ones(params, dtype=torch.float64), checksum=7)[0].numel() == params
        sent = booked(ledger.take())
    assert sent == moved(copies, shards, params)
    assert sum(sent.values()) <= (2 + 2 + 1 + 1) * ranks * 8 < 1e6 < ranks * (params + 1) * 8
