"""The timeline of a step: the seconds of pace.py bar by bar, in an order that a run could have."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from dzero.estimate.forecast import Forecast
from dzero.estimate.step_time import COMPUTE, DISK, HOST_LINK, UPDATE
from dzero.estimate.timeline import BACK, OUT, Bar, Timeline
from dzero.offload.buffer_layout import BufferLayout
from dzero.offload.build_schedule import update_order
from dzero.overrides import composed
from dzero.plan.plan_run import forecast_run

CONF = Path(__file__).parent.parent.parent / "conf"
SMALL = ["model.hidden_size=64", "model.layers=3", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]
RUNS = [
    "zero.stage=0",
    "zero.stage=1 train.accumulate=3",
    "zero.stage=2 train.accumulate=2 offload=host",
    "zero.stage=3 train.accumulate=2",
    "zero.stage=3 zero.reshard_after_forward=false mesh.replicate=2",
    "zero.stage=3 offload=host offload.overlap=step",
    "zero.stage=3 offload=host offload.overlap=backward",
    "zero.stage=3 offload=host offload.overlap=delayed",
    "zero.stage=3 offload=host_all train.accumulate=2 block.activation_checkpoint=full",
    "zero.stage=2 offload.master=host",
    "zero.stage=2 offload.moments=host",
    "zero.stage=2 offload=disk",
    "zero.stage=3 offload=infinity train.accumulate=2",
    "zero.stage=3 offload=infinity offload.overlap=step",
    "zero.stage=3 zero.node_ranks=2 zero.reshard_after_forward=2 precision.gather=int8 precision.reduce=int4",
    "zero.stage=3 offload=host offload.grad_fraction=0.5 offload.master_fraction=0.5 offload.moments_fraction=0.5",
]


@cache
def foreseen(run: str, hardware: str = "h100_80g") -> tuple[Forecast, Timeline]:
    config = composed([*SMALL, *run.split(), "mesh.dp=4", f"hardware={hardware}"], CONF)
    assert config.hardware is not None
    forecast = forecast_run(config, replace(config.hardware, devices_per_node=4))
    timeline = forecast.timeline()
    assert timeline is not None
    return forecast, timeline


def by_lane(timeline: Timeline) -> dict[str, list[Bar]]:
    lanes = defaultdict(list)
    for bar in sorted(timeline.bars, key=lambda bar: bar.start_s):
        lanes[bar.lane].append(bar)
    return lanes


@pytest.mark.product(keep=6)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("hardware", ["h100_80g", "laptop"])
def test_the_bars_of_a_lane_take_the_seconds_of_its_pace(run: str, hardware: str) -> None:
    forecast, timeline = foreseen(run, hardware)
    busy, seconds = timeline.busy_s(), forecast.pace.seconds
    link = [busy.pop(lane) for lane in (OUT, BACK) if lane in busy]
    assert busy == pytest.approx({lane: each for lane, each in seconds.items() if lane != HOST_LINK}, rel=1e-9)
    both = sum(link) if forecast.hardware.devices_are_host else max(link, default=0.0)
    assert both == pytest.approx(seconds.get(HOST_LINK, 0.0), rel=1e-9)


def test_copies_updated_in_backward_come_back_in_the_order_of_updates_in_every_process() -> None:
    """Not in that of a set, which differs from process to process, and with it what zero=auto would choose."""
    forecast, timeline = foreseen("zero.stage=3 offload=host offload.overlap=backward")
    early = BufferLayout(forecast.layout, forecast.units).early
    back = [bar.unit for bar in by_lane(timeline)[BACK] if bar.unit in early][: len(early)]
    assert len(early) > 1
    assert back == [unit.name for unit in update_order(forecast.units) if unit.name in early]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("hardware", ["h100_80g", "laptop"])
def test_a_lane_does_one_thing_at_a_time_and_a_cpu_one_thing_in_all(run: str, hardware: str) -> None:
    _, timeline = foreseen(run, hardware)
    lanes = by_lane(timeline)
    if hardware == "laptop":
        disk = {DISK: lanes.pop(DISK)} if DISK in lanes else {}
        lanes = {"cores": sorted((b for bars in lanes.values() for b in bars), key=lambda b: b.start_s), **disk}
    for bars in lanes.values():
        assert all(0 <= bar.start_s < bar.end_s for bar in bars)
        assert all(one.end_s <= two.start_s + 1e-12 for one, two in pairwise(bars))


@pytest.mark.parametrize("run", RUNS)
def test_a_step_is_as_long_as_its_lanes_allow(run: str) -> None:
    """On a CPU everything but the disk adds up."""
    for hardware in ("h100_80g", "laptop"):
        forecast, timeline = foreseen(run, hardware)
        assert timeline.end_s >= max(timeline.busy_s().values()) * (1 - 1e-9)
    busy, step_s = timeline.busy_s(), forecast.pace.step_s
    assert step_s is not None
    if DISK not in busy:
        assert timeline.end_s == pytest.approx(step_s, rel=1e-9)


def test_gradients_off_the_device_come_back_to_masters_on_it() -> None:
    _, timeline = foreseen("zero.stage=2 offload.grad=host")
    busy = timeline.busy_s()
    assert busy[BACK] == pytest.approx(busy[OUT])


def when(timeline: Timeline, kind: str, unit: str) -> list[Bar]:
    return sorted((b for b in timeline.bars if (b.kind, b.unit) == (kind, unit)), key=lambda bar: bar.start_s)


def test_a_unit_is_gathered_before_it_computes_and_reduced_evicted_and_updated_after() -> None:
    _, timeline = foreseen("zero.stage=3 offload=host offload.overlap=step")
    last = max(bar.end_s for bar in timeline.bars if bar.kind in ("reduce_scatter", "backward"))
    for unit in ("layers.0", "layers.1", "layers.2"):
        (forward,), (backward,) = (when(timeline, kind, unit) for kind in ("forward", "backward"))
        gathers = when(timeline, "all_gather", unit)
        (reduce,), (evict,), (update,), (fetch,) = (
            when(timeline, kind, unit) for kind in ("reduce_scatter", "evict", UPDATE, "fetch")
        )
        for gather, compute in zip(gathers, (forward, backward), strict=True):
            assert gather.end_s <= compute.start_s
        assert backward.end_s <= reduce.start_s < reduce.end_s <= evict.start_s < evict.end_s <= update.start_s
        assert last <= update.start_s < update.end_s <= fetch.start_s


def test_one_unit_is_gathered_ahead_and_no_more() -> None:
    _, timeline = foreseen("zero.stage=3")
    for earlier, unit in (("layers.0", "layers.1"), ("layers.1", "layers.2")):
        gather, forward = when(timeline, "all_gather", unit)[0], when(timeline, "forward", earlier)[0]
        assert gather.start_s >= forward.start_s
    assert any(gather.start_s < compute.end_s and compute.start_s < gather.end_s
               for gather in by_lane(timeline)["shard"] for compute in by_lane(timeline)[COMPUTE])  # fmt: skip


def test_overlap_moves_updates_to_where_its_name_says() -> None:
    ends = {}
    for mode in ("step", "forward", "backward", "delayed"):
        _, timeline = foreseen(f"zero.stage=3 offload=host offload.overlap={mode}")
        ends[mode] = timeline.end_s
        forward = {unit: when(timeline, "forward", unit)[0] for unit in ("layers.0", "layers.1", "layers.2")}
        backward = min(bar.start_s for bar in timeline.bars if bar.kind == "backward")
        for unit, bar in forward.items():
            (update,) = when(timeline, UPDATE, unit)
            (back,) = when(timeline, "fetch", unit)
            if mode == "forward":
                assert update.end_s <= back.start_s < back.end_s <= bar.start_s
            if mode == "backward":
                assert back.start_s < forward["layers.0"].start_s
                assert update.start_s >= backward
    assert ends["delayed"] <= ends["forward"] <= ends["step"]


def test_disk_is_read_ahead_as_far_as_turns_reach() -> None:
    _, timeline = foreseen("zero.stage=2 offload=disk offload.overlap=step model.layers=8")
    updates = sorted((b for b in timeline.bars if b.kind == UPDATE), key=lambda bar: bar.start_s)
    loads = {bar.unit: bar for bar in timeline.bars if bar.kind == "load"}
    spills = {bar.unit: bar for bar in timeline.bars if bar.kind == "spill"}
    for update in updates:
        assert loads[update.unit].end_s <= update.start_s
        assert update.end_s <= spills[update.unit].start_s
    for freed, update in zip(updates, updates[3:], strict=False):
        assert spills[freed.unit].end_s <= loads[update.unit].start_s


def test_every_microbatch_is_there() -> None:
    forecast, timeline = foreseen("zero.stage=3 model.layers=24 train.accumulate=16")
    assert len(timeline.bars) > 16 * 24 * 5
    assert len(timeline.microbatches_s) == 16
    assert forecast.pace.step_s is not None
    assert timeline.end_s >= forecast.pace.step_s * (1 - 1e-9)


def test_sums_in_two_hops_leave_a_node_once_and_exact_ones_in_one_hop_from_every_rank() -> None:
    """16 ranks on two nodes of 8: what crosses does so at the network's speed, and the rest at that of the node."""
    lines = {"one hop": "zero.reduction=exact", "nodes": "zero.node_ranks=8", "native": "zero.reduction=native"}
    found = {}
    for name, line in lines.items():
        config = composed([*SMALL, "mesh.dp=16", "zero.stage=2", "hardware=h100_80g", *line.split()], CONF)
        assert config.hardware is not None
        hardware = replace(config.hardware, collective_latency_s=0.0)
        found[name] = forecast_run(config, hardware).pace.seconds["shard"]
    inside, outside = hardware.within_nodes, hardware.between_nodes
    assert inside is not None
    assert outside is not None
    elems = sum(unit.shard_elems(16) for unit in forecast_run(config, hardware).units)
    gather, wire = 2 * elems, 2 * elems  # bf16
    assert found["one hop"] == pytest.approx(8 * (gather + wire) / outside)
    first, second = 7 * 2 * wire / inside, 4 * elems / outside
    assert found["nodes"] == pytest.approx(gather / outside + 7 * 2 * gather / inside + first + second)
    assert found["nodes"] < found["one hop"]
