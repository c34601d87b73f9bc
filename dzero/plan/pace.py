"""Seconds of a step, and what sets them: work and bytes over the rates of the hardware.

    what                 work                                   over
    compute              matmuls of forward and backward        reachable FLOP/s of the device
    shard, replicate     bytes sent along an axis (account.py)  the axis' link, and a latency for each call
    host link            what leaves the device and comes back  its slower direction (both go at once)
    host update          parameters whose masters are off it    the host's elements per second
    disk                 what is read and written               the disks', one after the other

    phase      what goes on at once                             so it takes
    backward   compute, collectives, host link, disk (params)   the longest of them
    update     host update, host link, disk (states)            the longest of them
    step       overlap=step: one after the other; forward: the update beside forward; backward, delayed: beside both

On a CPU, cores are the device, the links and the host at once: there everything but the disk adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dzero.mesh import REPLICATE, SHARD
from dzero.offload.actions import update_order
from dzero.offload.places import Places
from dzero.plan.costs import BACKWARD, FORWARD, Costs
from dzero.plan.machine import HardwareConfig
from dzero.zero.account import expected_traffic
from dzero.zero.layout import Layout
from dzero.zero.shapes import UnitShape
from dzero.zero.tiers import names_off_device

COMPUTE, HOST_LINK, UPDATE, DISK = "compute", "host link", "host update", "disk"


@dataclass(frozen=True)
class Moved:
    """Bytes of one rank and step. `out`, `back`: device to host, and host to device."""

    axes: Mapping[str, int]
    calls: Mapping[str, int]
    out: int
    back: int
    read: int
    written: int


@dataclass(frozen=True)
class Pace:
    """Seconds of a step by what takes them. `unknown`: figures that the hardware lacks; without them no `step_s`."""

    seconds: Mapping[str, float]
    step_s: float | None
    bound: str
    unknown: tuple[str, ...]


def moved_of(layout: Layout, units: Sequence[UnitShape]) -> Moved:
    """What one rank moves in a step."""
    axes: dict[str, int] = {}
    calls: dict[str, int] = {}
    for entry, traffic in expected_traffic(layout, units).items():
        axes[entry.axis] = axes.get(entry.axis, 0) + traffic.sent_bytes
        calls[entry.axis] = calls.get(entry.axis, 0) + traffic.calls
    away = names_off_device(layout.tiers, units)
    shards = {p.name: p.shard_elems(layout.shard) for unit in units for p in unit.params}

    def elems(kind: str, tier: str | None = None) -> int:
        """Of the states of a kind that are off the device, or on one tier."""
        return sum(shards[name] for name in away[kind]) if tier in (None, layout.tiers[kind][0]) else 0

    reductions = layout.microbatches if layout.grad.sharded else 1
    gradient, working = layout.grad.dtype.itemsize, layout.param.dtype.itemsize
    leaving = reductions * elems("grad") + sum(shards[name] for name in away["master"] - away["grad"])
    arriving = sum(shards[name] for name in away["master"] - away["param"])
    uses = 2 * layout.microbatches if layout.reshard_after_forward is not False else layout.microbatches
    moments = 2 * layout.moments.dtype.itemsize
    apart = moments * sum(shards[name] for name in away["master"] ^ away["moments"])
    read, written = _states_on_disk(Places(layout, units), units)
    on_disk = {"param": elems("param", "disk") * working, "grad": elems("grad", "disk") * gradient}
    return Moved(
        axes=axes,
        calls=calls,
        out=leaving * gradient + apart,
        back=arriving * working + uses * elems("param") * working + apart,
        read=read + uses * on_disk["param"] + reductions * on_disk["grad"],
        written=written + on_disk["param"] + reductions * on_disk["grad"],
    )


def _states_on_disk(places: Places, units: Sequence[UnitShape]) -> tuple[int, int]:
    """Bytes read and written; a unit that its host slot still holds from the step before is not read again."""
    read = written = 0
    sizes, holds = places.piece_bytes(), dict[str, str]()
    for step in range(2):
        for unit in update_order(units):
            for pair in places.pairs("states", unit.name):
                read += sizes[pair.disk] if step and holds.get(pair.host) != unit.name else 0
                holds[pair.host] = unit.name
            written += sum(sizes[pair.disk] for pair in places.going("states", unit.name)) if step else 0
    return read, written


def pace_of(layout: Layout, units: Sequence[UnitShape], costs: Costs, hardware: HardwareConfig) -> Pace:
    """Of a step on `hardware`."""
    ranks, moved, share = layout.ranks, moved_of(layout, units), hardware.share(layout.ranks)
    unknown: list[str] = []

    def over(work: float, rate: float | None, key: str) -> float:
        if work and rate is None:
            unknown.append(key)
        return work / rate if work and rate else 0.0

    stride = {SHARD: 1, REPLICATE: layout.shard}
    degree = {SHARD: layout.shard, REPLICATE: layout.replicate}
    flops = hardware.reachable_flops(layout.param.dtype)
    parts = {way: over(layout.microbatches * costs.flops(way), flops, "flops") for way in (FORWARD, BACKWARD)}
    seconds = {COMPUTE: sum(parts.values())}
    for axis, count in moved.axes.items():
        link = hardware.link(degree[axis], stride=stride[axis], world=ranks)
        seconds[axis] = over(count, link, "node_link or network") + moved.calls[axis] * hardware.collective_latency_s
    seconds[HOST_LINK] = over(max(moved.out, moved.back), share.host_link, "host_link")
    updated = names_off_device(layout.tiers, units)["master"]
    elems = sum(p.shard_elems(layout.shard) for unit in units for p in unit.params if p.name in updated)
    seconds[UPDATE] = over(elems, share.update_elems_per_s, "update_elems_per_s")
    seconds[DISK] = over(moved.read, share.disk_read, "disk_read") + over(moved.written, share.disk_write, "disk_write")
    if hardware.devices_are_host:
        step = max(sum(seconds.values()) - seconds[DISK], seconds[DISK])
    else:
        train = max(seconds[COMPUTE], *(seconds.get(axis, 0.0) for axis in degree), seconds[HOST_LINK])
        update = max(seconds[UPDATE], seconds[DISK], seconds[HOST_LINK] if updated else 0.0)
        forward = train * parts[FORWARD] / seconds[COMPUTE] if seconds[COMPUTE] else 0.0
        beside = {"step": 0.0, "forward": forward}.get(layout.offload.mode, train)
        step = train + max(0.0, update - beside)
    bound = max(seconds, key=lambda what: seconds[what])
    taken = {what: each for what, each in seconds.items() if each}
    return Pace(taken, None if unknown else step, bound, tuple(dict.fromkeys(unknown)))
