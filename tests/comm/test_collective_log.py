"""Ranks that begin different collectives are refused with both sides named, and no data of one reaches the other."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import nn

from dzero import AdamW, shard
from dzero.comm.collective_log import CollectiveLog
from dzero.comm.collectives import ReduceGrads, UnshardParams
from dzero.comm.ledger import Ledger
from dzero.comm.reduction import ExactReduction
from dzero.comm.stalls import RankStatus, report, silent, stuck
from dzero.errors import RankLost


def begin(rank: int, ledger: Ledger, elems: tuple[int, int], timeout_s: float = 60.0) -> None:
    """Rank 0 gathers one unit, the others reduce another, of `elems` per rank."""
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    exchange = ExactReduction(group)
    if rank == 0:
        part = torch.zeros(elems[0])
        gather = UnshardParams("layers.0", exchange, "shard", ledger, lambda: None)
        work = gather(part.new_empty(exchange.ranks * elems[0]), part, group, async_op=False)
        assert work is not None
        work.wait()
    else:
        reduce = ReduceGrads("layers.1", exchange, "shard", torch.float32, ledger)
        reduce(torch.zeros(elems[1]), torch.ones(exchange.ranks * elems[1]), group, None)


def checked(rank: int, ranks: int) -> str:
    ledger = Ledger()
    ledger.collective_log.check = True
    with pytest.raises(RuntimeError) as refused:
        begin(rank, ledger, (8, 8))
    return str(refused.value)


@pytest.mark.parametrize("ranks", [2, 3])
def test_checked_collectives_name_both_sides_before_data_moves(pool: Pool, ranks: int) -> None:
    for said in pool.run(checked, ranks):
        assert "  rank 0: #1 all_gather of layers.0 over shard [8 x float32]\n" in said
        assert "  rank 1: #1 reduce_scatter of layers.1 over shard [8 x float32]" in said


def of_other_sizes(rank: int, ranks: int) -> str:
    """Without the check, and with a timeout of a second."""
    ledger = Ledger()
    with pytest.raises(RuntimeError):
        begin(rank, ledger, (8, 16), timeout_s=1.0)
    return ledger.collective_log.at[1]


def test_collectives_of_other_sizes_fail_on_both_sides_and_end_no_process(pool: Pool) -> None:
    """gloo alone ends one rank's process and hands the other a part of the data."""
    assert pool.run(of_other_sizes, 2) == [
        "#1 all_gather of layers.0 over shard [8 x float32]",
        "#1 reduce_scatter of layers.1 over shard [16 x float32]",
    ]


def two_models(rank: int, ranks: int) -> str:
    """Two models of one shape, which the ranks step in different orders."""
    models = [shard(nn.Linear(4, 4), stage=2, precision="fp32") for _ in range(2)]
    optims = [AdamW(model) for model in models]
    models[rank].model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError) as refused:
        optims[rank].step()
    return str(refused.value)


def test_models_of_one_shape_are_told_apart(pool: Pool) -> None:
    for said in pool.run(two_models, 2):
        assert "rank 1: the step of model 2" in said


def two_models_without_an_answer(rank: int, ranks: int) -> str:
    """The same, where ranks do not meet any more to say where they part."""
    lost = RuntimeError("Connection reset by peer\nand a stack")
    with mock.patch.object(CollectiveLog, "divergence", side_effect=lost):
        return two_models(rank, ranks)


def test_ranks_that_diverged_are_told_though_nobody_answers_where(pool: Pool) -> None:
    for said in pool.run(two_models_without_an_answer, 2):
        assert "in another order than rank 0" in said
        assert "where they part is unknown" in said
        assert "Connection reset by peer" in said


BOTH = (0, 2)


def waits(
    rank: int, meets: str, *, own: bool = False, group: tuple[int, ...] = BOTH, count: int = 7, at: str = ""
) -> RankStatus:
    where = f"#{count} all_gather"
    return RankStatus(rank, "host", rank, 5, count, where, "", True, own, meets or where, group, 10.0, at)


@pytest.mark.parametrize(
    ("places", "found"),
    [
        ([waits(0, "", own=True), waits(1, "barrier")], {0, 1}),
        ([waits(0, "barrier"), waits(1, "barrier")], set()),
        ([waits(0, "broadcast", group=()), waits(1, "barrier")], set()),  # a process beside the ranks may wake it
        ([waits(0, "send"), waits(1, "recv")], set()),
        ([waits(0, "recv"), waits(1, "", own=True)], set()),  # another thread of rank 1 may send
        ([waits(0, "wait"), waits(1, "barrier")], set()),  # perhaps for what the other begins
        ([waits(0, "wait"), waits(1, "", own=True)], {0, 1}),
        ([waits(0, "", own=True), waits(1, "", own=True, count=8)], set()),  # rank 1 has its part of number 7
        ([waits(0, "", own=True), waits(1, "", own=True, count=9)], {0, 1}),
        ([waits(0, "", own=True), waits(1, "an agreement", own=True, count=8, at="an agreement")], {0, 1}),
        ([waits(0, "", own=True), None], set()),
        ([waits(0, "", own=True), waits(1, "barrier"), None], {0, 1}),
        ([waits(0, "all_reduce"), waits(1, "all_reduce"), *(waits(r, "barrier", group=(2, 4)) for r in (2, 3))], set()),
        ([waits(0, "", own=True, group=(0, 4)), *(waits(r, "barrier", group=(1, 4)) for r in (1, 2, 3))], set()),
        ([waits(0, "all_reduce"), replace(waits(1, "all_reduce"), waits_s=1.0)], set()),
        ([waits(0, "all_reduce", group=(0, 3)), replace(waits(1, "all_reduce"), ended="no error"), None], {0}),
    ],
)
def test_ranks_are_stuck_that_wait_for_each_other_in_different_places_or_for_one_that_left(
    places: list[RankStatus | None], found: set[int]
) -> None:
    assert stuck(places, []) == found


PLACES = [
    RankStatus(rank, "host", 100 + rank, 5, 7, "#7 all_gather of a over shard [8 x float32]") for rank in range(4)
]
WITHIN = " within launch.timeout_s=5"


def told(places: list[RankStatus | None], missing: list[RankStatus]) -> str:
    return report(places, missing, 0, WITHIN, RuntimeError("Timed out\nsomewhere"))


def test_a_report_names_the_first_cause_it_knows() -> None:
    later = [RankStatus(**{**vars(place), "beat": 6}) for place in PLACES]
    hung = [later[0], PLACES[1], *later[2:]]
    assert silent(PLACES, hung) == [PLACES[1]]
    assert "rank 1 (pid 101 on host) gives no sign of life" in told([*hung], [PLACES[1]])
    assert "  rank 0, 2-3: #7 all_gather of a" in told([*hung], [PLACES[1]])

    ended = RankStatus(**{**vars(PLACES[1]), "ended": "ValueError: the cause"})
    assert silent(PLACES, [later[0], ended, *later[2:]]) == []
    assert "rank 1 (pid 101 on host) ended with ValueError: the cause" in told([later[0], ended], [])

    other = RankStatus(**{**vars(later[1]), "last": "#7 reduce_scatter of b over shard [8 x float32]"})
    assert "have diverged: rank 0 (pid 100 on host) is in #7 all_gather of a" in told([later[0], other], [])
    behind = RankStatus(**{**vars(later[1]), "count": 3, "last": "#3 all_gather of a over shard [8 x float32]"})
    assert "within launch.timeout_s=5: rank 1 (pid 101 on host) is behind" in told([later[0], behind], [])

    waiting = [RankStatus(**{**vars(place), "waits": True}) for place in later]
    of_parts = report([waiting[0], behind, *waiting[2:]], [], 0, WITHIN, RuntimeError("Timed out"), is_pipeline=True)
    assert "within launch.timeout_s=5: rank 1 (pid 101 on host) waits for no other rank" in of_parts

    network = [waits(0, "", own=True), waits(1, "", own=True, count=8)]
    assert "within launch.timeout_s=5: every rank is there" in told([*network], [])
    assert "rank 1 (pid 1 on host) is in #9" in told([network[0], waits(1, "", own=True, count=9)], [])
    assert "rank 1 is not there yet" in told([network[0], None], [])

    wordless = report([*hung], [PLACES[1]], 0, WITHIN, AssertionError())
    assert wordless.endswith("the backend says: AssertionError")

    lost = report([*hung], [PLACES[1]], 0, WITHIN, RankLost("ck: a rank is gone: Timed out waiting"))
    assert lost.startswith(
        "rank 0 got no answer about a checkpoint within launch.timeout_s=5: rank 1 (pid 101 on host)"
    )

    early = [RankStatus(rank, "host", 100 + rank, 0, 0, "before its first collective") for rank in range(2)]
    start = report([*early], [early[1]], 0, WITHIN, dist.DistStoreError("wait timeout after 5000ms"))
    assert start.startswith("rank 0 got no answer at the start within launch.timeout_s=5: rank 1 (pid 101 on host)")
