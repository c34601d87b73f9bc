"""What a rank says of collectives that others do not come to: which part, who is stuck or behind, and what is counted.

Collectives that differ between ranks are refused before data moves; `stuck` and `report` decide what is said of ranks
that wait; the watchdog follows a device, and begins nothing that lives on.
"""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
import warnings
import weakref
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fake_ranks import fake_ranks
from on_ranks import on_ranks
from pool import Pool
from torch import nn
from torch.distributed import _functional_collectives as functional

from dzero import AdamW, shard, streams
from dzero.comm import dtensor_traffic
from dzero.comm import watchdog as watching
from dzero.comm.collective_log import Collective, CollectiveLog
from dzero.comm.collectives import ReduceGrads, UnshardParams
from dzero.comm.ledger import Entry, Ledger, Traffic
from dzero.comm.reduction import ExactReduction
from dzero.comm.stalls import RankStatus, report, silent, stuck
from dzero.comm.watchdog import Watchdog
from dzero.errors import RankLost
from dzero.launch import worker

TIMEOUT_S = 3.0
CPU = torch.device("cpu")


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


@on_ranks(3)
def test_checked_collectives_name_both_sides_before_data_moves(rank: int, ranks: int) -> None:
    ledger = Ledger()
    ledger.collective_log.check = True
    both = [r"all_gather of layers\.0", r"reduce_scatter of layers\.1"]
    says = [rf"  rank {number}: #1 {each} over shard \[8 x float32\]\n" for number, each in enumerate(both)]
    with pytest.raises(RuntimeError, match="".join(says)):
        begin(rank, ledger, (8, 8))


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


def two_models(rank: int, ranks: int) -> list[str]:
    """Two models of one shape, which the ranks step in different orders; and where nobody answers where they part."""
    said = []
    lost = mock.patch.object(CollectiveLog, "divergence", side_effect=RuntimeError("Connection reset\nand a stack"))
    for answers in (nullcontext(), lost):
        models = [shard(nn.Linear(4, 4), stage=2, precision="fp32") for _ in range(2)]
        optims = [AdamW(model) for model in models]
        models[rank].model(torch.ones(1, 4)).sum().backward()
        with answers, pytest.raises(RuntimeError) as refused:
            optims[rank].step()
        said.append(str(refused.value))
    return said


def test_models_of_one_shape_are_told_apart(pool: Pool) -> None:
    for answered, unanswered in pool.run(two_models, 2):
        assert re.search(r"rank 1: the step of model \d", answered)
        assert "in another order than rank 0" in unanswered
        assert "where they part is unknown" in unanswered
        assert "Connection reset" in unanswered


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
    """Ranks that are silent, behind, elsewhere or gone are named as tests/comm/test_watchdog.py asks; these besides."""
    later = [replace(place, beat=6) for place in PLACES]
    hung = [later[0], PLACES[1], *later[2:]]
    assert silent(PLACES, hung) == [PLACES[1]]
    assert "rank 1 (pid 101 on host) gives no sign of life" in told([*hung], [PLACES[1]])
    assert "  rank 0, 2-3: #7 all_gather of a" in told([*hung], [PLACES[1]])
    assert silent(PLACES, [later[0], replace(PLACES[1], ended="ValueError: the cause"), *later[2:]]) == []

    behind = replace(later[1], count=3, last="#3 all_gather of a over shard [8 x float32]")
    waiting = [replace(place, waits=True) for place in later]
    of_parts = report([waiting[0], behind, *waiting[2:]], [], 0, WITHIN, RuntimeError("Timed out"), is_pipeline=True)
    assert "within launch.timeout_s=5: rank 1 (pid 101 on host) waits for no other rank" in of_parts

    network = [waits(0, "", own=True), waits(1, "", own=True, count=8)]
    assert "within launch.timeout_s=5: every rank is there" in told([*network], [])
    assert "rank 1 (pid 1 on host) is in #9" in told([network[0], waits(1, "", own=True, count=9)], [])
    assert "rank 1 is not there yet" in told([network[0], None], [])
    assert report([*hung], [PLACES[1]], 0, WITHIN, AssertionError()).endswith("the backend says: AssertionError")
    lost = report([*hung], [PLACES[1]], 0, WITHIN, RankLost("ck: a rank is gone: Timed out waiting"))
    assert lost.startswith("rank 0 got no answer about a checkpoint within launch.timeout_s=5: rank 1 (pid 101")
    early = [RankStatus(rank, "host", 100 + rank, 0, 0, "before its first collective") for rank in range(2)]
    start = report([*early], [early[1]], 0, WITHIN, dist.DistStoreError("wait timeout after 5000ms"))
    assert start.startswith("rank 0 got no answer at the start within launch.timeout_s=5: rank 1 (pid 101 on host)")


class Event:
    """An event that the device has come to, or does not come to."""

    def __init__(self, is_over: bool) -> None:
        self._is_over = is_over

    def record(self, stream: object) -> None:
        """Nothing comes behind it."""

    def query(self) -> bool:
        return self._is_over


def stand(rank: int, ranks: int) -> str:
    """Rank 0's device waits in a collective that rank 1 never begins; return what rank 0's thread said."""
    module = mock.Mock(Event=lambda blocking: Event(is_over=rank != 0))
    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    told: list[str] = []
    with (
        mock.patch.object(streams, "device_module", return_value=module),
        mock.patch.object(threading, "excepthook", lambda args: told.append(str(args.exc_value))),
        Watchdog(timedelta(seconds=TIMEOUT_S)) as watch,
    ):
        collective_log = CollectiveLog()
        collective_log.device = CPU
        watch.follow(collective_log)
        begun = [("reduce_scatter", "layers.0"), ("all_gather", "layers.1")]
        for kind, unit in begun if rank == 0 else begun[:1]:
            with collective_log.within(Collective.of(kind, unit, "shard", 64, torch.float32), dist.group.WORLD):
                pass
        if rank == 0:
            until_s = time.monotonic() + 120  # for hangs
            while not told and time.monotonic() < until_s:
                time.sleep(0.05)
            store.set("rank 0 has told", "")
        else:
            while not store.check(["rank 0 has told"]):  # a wait would hold the connection that the beats need
                time.sleep(0.05)
    return told[0] if told else ""


@pytest.mark.full("tests/comm/test_watchdog.py::test_a_loop_of_ones_own_that_stalls_says_who_waits_where")
def test_a_collective_that_the_device_waits_in_is_told_at_the_timeout(pool: Pool) -> None:
    said, _ = pool.run(stand, 2)
    assert "rank 0 got no answer in #2 all_gather of layers.1 over shard [64 x float32]" in said
    assert f"within launch.timeout_s={TIMEOUT_S:g}" in said
    assert "rank 1 (pid" in said
    assert "is behind" in said
    assert "rank 1: #1 reduce_scatter of layers.0" in said


def held_through_beats(rank: int, ranks: int) -> list[bool]:
    """Whether what a call had lives on, of the call that began the watchdog, and of one that saw several beats."""

    class Large:
        pass

    def call() -> weakref.ref[Large]:
        large = Large()
        watching.begin()
        time.sleep(2.5 * watching.BEAT_S)
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        return [call()() is not None for _ in range(2)]
    finally:
        gc.enable()


@pytest.mark.full("tests/zero/test_made_anew.py::test_what_is_made_anew_leaves_nothing")
def test_what_a_call_had_is_freed_when_it_returns(pool: Pool) -> None:
    assert pool.run(held_through_beats, 2) == [[False, False]] * 2


@pytest.mark.parametrize(("given", "chosen"), [({}, "expandable_segments:True"), ({"PYTORCH_ALLOC_CONF": "x:1"}, None)])
def test_memory_of_cuda_grows_in_place_unless_the_user_chose(given: dict[str, str], chosen: str | None) -> None:
    others = {name: value for name, value in os.environ.items() if name not in worker.ALLOCATOR_SETTINGS}
    with mock.patch.dict(os.environ, others | given, clear=True):
        worker.choose_allocator()
        assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == chosen


class Waits:
    """Something with a method in C that is called `wait`, and does not return before `lock` is released."""

    def __init__(self, lock: threading.Lock) -> None:
        self.wait = lock.acquire


@pytest.mark.parametrize(("line", "found"), [("begun().wait()", "wait"), ("service.wait()", "")])
def test_only_what_may_be_torchs_counts_as_waiting_for_ranks(line: str, found: str) -> None:
    """Where a variable has another object, as of a service, it is no wait for ranks."""
    (lock := threading.Lock()).acquire()
    code, service = compile(line, "own.py", "exec"), Waits(lock)
    thread = threading.Thread(target=exec, args=(code, {"begun": lambda: service, "service": service}), daemon=True)
    thread.start()
    frame = None
    while frame is None or frame.f_code is not code:
        frame = sys._current_frames().get(thread.ident or 0)
    until_s = time.monotonic() + 120  # for hangs
    while watching.called_by(frame) != found:
        assert time.monotonic() < until_s
        time.sleep(0.01)
    lock.release()


def test_a_collective_that_is_not_in_the_table_is_counted_under_its_name() -> None:
    dtensor_traffic._warn_of.cache_clear()
    ledger, tensor = Ledger(), torch.ones(6)
    with fake_ranks(2), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        group = dist.group.WORLD
        assert group is not None
        with dtensor_traffic.dtensor_traffic(group, "tp", ledger):
            functional.all_reduce(tensor, "sum", group)
            functional.broadcast(tensor, 0, group)
            functional.broadcast(tensor, 0, group)
            functional.all_reduce_coalesced([tensor, tensor], "sum", group)
    assert ledger.totals() == {
        Entry(dtensor_traffic.PHASE, "all_reduce", "tp", "float32"): Traffic(1, 2 * 6 * 4 // 2),
        Entry(dtensor_traffic.PHASE, "unknown broadcast", "tp", "float32"): Traffic(2, 0),
        Entry(dtensor_traffic.PHASE, "unknown all_reduce_coalesced", "tp", "float32"): Traffic(1, 0),
    }
    told = [str(each.message) for each in said]
    assert [line.split(",")[0] for line in told if "calls the collective" in line] == [
        "an operator of the model calls the collective broadcast",
        "an operator of the model calls the collective all_reduce_coalesced",
    ]
