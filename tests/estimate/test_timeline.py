"""The timeline of a step: the seconds of its pace bar by bar, in an order that a run could have."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from itertools import pairwise
from typing import Any

import from_words
import pytest

SMALL = "model.hidden_size=64 model.layers=3 model.heads=2 model.ffn_size=128 model.vocab_size=256 mesh.dp=4"
LINK, OUT, BACK, DISK = "host link", "device to host", "host to device", "disk"
UNITS = ("layers.0", "layers.1", "layers.2")


@cache
def foreseen(run: str, hardware: str = "h100_80g") -> tuple[Any, Any]:
    plan = from_words.forecast(*SMALL.split(), f"hardware={hardware}", *run.split(), devices_per_node=4)
    return plan, plan.timeline()


def in_order(bars: Any) -> list[Any]:
    return sorted(bars, key=lambda bar: bar.start_s)


def by_lane(timeline: Any) -> dict[str, list[Any]]:
    lanes = defaultdict(list)
    for bar in in_order(timeline.bars):
        lanes[bar.lane].append(bar)
    return lanes


def when(timeline: Any, kind: str, unit: str | None = None) -> list[Any]:
    return in_order(bar for bar in timeline.bars if bar.kind == kind and unit in (None, bar.unit))


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("hardware", ["h100_80g", "laptop"])
@pytest.mark.parametrize(
    "run",
    [
        "zero.stage=0",
        "zero.stage=3 zero.reshard_after_forward=false mesh.replicate=2",
        "zero.stage=3 offload=host offload.overlap=backward",
        "zero.stage=3 offload=host_all train.accumulate=2 block.activation_checkpoint=full",
        "zero.stage=2 offload.master=host",
        "zero.stage=3 offload=infinity train.accumulate=2",
        "zero.stage=3 zero.node_ranks=2 zero.reshard_after_forward=2 precision.gather=int8 precision.reduce=int4",
        "zero.stage=3 offload=host offload.grad_fraction=0.5 offload.master_fraction=0.5 offload.moments_fraction=0.5",
    ],
)
def test_lanes_take_the_seconds_of_their_pace_one_thing_at_a_time(run: str, hardware: str) -> None:
    """A CPU does one thing in all, but for the disk, so a step there takes what its lanes take together."""
    plan, timeline = foreseen(run, hardware)
    busy, seconds = timeline.busy_s(), plan.pace.seconds
    assert timeline.end_s >= max(busy.values()) * (1 - 1e-9)
    if hardware == "laptop" and DISK not in busy:
        assert timeline.end_s == pytest.approx(plan.pace.step_s, rel=1e-9)
    link = [busy.pop(lane) for lane in (OUT, BACK) if lane in busy]
    assert busy == pytest.approx({lane: each for lane, each in seconds.items() if lane != LINK}, rel=1e-9)
    both = sum(link) if hardware == "laptop" else max(link, default=0.0)
    assert both == pytest.approx(seconds.get(LINK, 0.0), rel=1e-9)

    lanes = by_lane(timeline)
    if hardware == "laptop":
        disk = {DISK: lanes.pop(DISK)} if DISK in lanes else {}
        lanes = {"cores": in_order(bar for bars in lanes.values() for bar in bars), **disk}
    for bars in lanes.values():
        assert all(0 <= bar.start_s < bar.end_s for bar in bars)
        assert all(one.end_s <= two.start_s + 1e-12 for one, two in pairwise(bars))


def test_copies_updated_in_backward_come_back_in_the_order_of_their_use_and_gradients_to_masters() -> None:
    """And not in the order of a set, which differs from process to process, and with it what zero=auto would choose."""
    _, timeline = foreseen("zero.stage=3 offload=host offload.overlap=backward")
    assert [bar.unit for bar in by_lane(timeline)[BACK]] == ["root", *UNITS]
    busy = foreseen("zero.stage=2 offload.grad=host")[1].busy_s()  # masters are on the device
    assert busy[BACK] == pytest.approx(busy[OUT])


def test_a_unit_is_gathered_before_it_computes_and_reduced_evicted_and_updated_after() -> None:
    _, timeline = foreseen("zero.stage=3 offload=host offload.overlap=step")
    last = max(bar.end_s for kind in ("reduce_scatter", "backward") for bar in when(timeline, kind))
    for unit in UNITS:
        (forward,), (backward,) = when(timeline, "forward", unit), when(timeline, "backward", unit)
        for gather, compute in zip(when(timeline, "all_gather", unit), (forward, backward), strict=True):
            assert gather.end_s <= compute.start_s
        (reduce,), (evict,), (update,), (fetch,) = (
            when(timeline, kind, unit) for kind in ("reduce_scatter", "evict", "update", "fetch")
        )
        assert backward.end_s <= reduce.start_s < reduce.end_s <= evict.start_s < evict.end_s <= update.start_s
        assert last <= update.start_s < update.end_s <= fetch.start_s


def test_one_unit_is_gathered_ahead_while_another_computes_and_no_more() -> None:
    _, timeline = foreseen("zero.stage=3")
    for earlier, unit in pairwise(UNITS):
        assert when(timeline, "all_gather", unit)[0].start_s >= when(timeline, "forward", earlier)[0].start_s
    lanes = by_lane(timeline)
    assert any(
        gather.start_s < compute.end_s and compute.start_s < gather.end_s
        for gather in lanes["shard"]
        for compute in lanes["compute"]
    )


def test_overlap_moves_updates_to_where_its_name_says() -> None:
    ends = {}
    for mode in ("step", "forward", "backward", "delayed"):
        _, timeline = foreseen(f"zero.stage=3 offload=host offload.overlap={mode}")
        ends[mode] = timeline.end_s
        forward = {unit: when(timeline, "forward", unit)[0] for unit in UNITS}
        for unit, bar in forward.items():
            (update,), (back,) = when(timeline, "update", unit), when(timeline, "fetch", unit)
            if mode == "forward":
                assert update.end_s <= back.start_s < back.end_s <= bar.start_s
            if mode == "backward":
                assert back.start_s < forward["layers.0"].start_s
                assert update.start_s >= when(timeline, "backward")[0].start_s
    assert ends["delayed"] <= ends["forward"] <= ends["step"]


def test_disk_is_read_ahead_as_far_as_turns_reach() -> None:
    _, timeline = foreseen("zero.stage=2 offload=disk offload.overlap=step model.layers=8")
    updates = when(timeline, "update")
    loads, spills = ({bar.unit: bar for bar in when(timeline, kind)} for kind in ("load", "spill"))
    for update in updates:
        assert loads[update.unit].end_s <= update.start_s
        assert update.end_s <= spills[update.unit].start_s
    for freed, update in zip(updates, updates[3:], strict=False):
        assert spills[freed.unit].end_s <= loads[update.unit].start_s


def test_sums_in_two_hops_leave_a_node_once_and_exact_ones_in_one_hop_from_every_rank() -> None:
    """16 ranks on two nodes of 8: what crosses does so at the network's speed, and the rest at that of the node."""
    plans = {
        name: from_words.forecast(
            *SMALL.split(), "mesh.dp=16", "zero.stage=2", "hardware=h100_80g", setting, collective_latency_s=0.0
        )
        for name, setting in {"one hop": "zero.reduction=exact", "nodes": "zero.node_ranks=8"}.items()
    }
    found = {name: plan.pace.seconds["shard"] for name, plan in plans.items()}
    hardware = plans["nodes"].hardware
    inside, outside = hardware.within_nodes, hardware.between_nodes
    elems = sum(unit.shard_elems(16) for unit in plans["nodes"].units)
    gather, wire = 2 * elems, 2 * elems  # bf16
    assert found["one hop"] == pytest.approx(8 * (gather + wire) / outside)
    first, second = 7 * 2 * wire / inside, 4 * elems / outside
    assert found["nodes"] == pytest.approx(gather / outside + 7 * 2 * gather / inside + first + second)
    assert found["nodes"] < found["one hop"]
