"""Seconds of a step, and what sets them: work and bytes over the rates of the hardware.

    what                 work                                   over
    compute              operators of forward and backward      reachable FLOP/s and bandwidth of the device; beside it,
                         (costs.py)                             the program's own time, a moment for each operator
    shard, replicate     bytes sent along an axis (account.py)  the axis' link, and a latency for each call
    update               states on the device                   its bandwidth (a CPU: the host's elements per second)
    host link            what leaves the device and comes back  its slower direction (both go at once)
    host update          parameters whose masters are off it    the host's elements per second
    disk                 what is read and written               the disks', one after the other

    phase      what goes on at once                             so it takes
    backward   compute, collectives, host link, disk (params)   the longest of them
    update     host update, host link, disk (states)            the longest of them; before it, that on the device
    step       overlap=step: one after the other; forward: the update beside forward; backward, delayed: beside both

On a CPU, cores are the device, the links and the host at once: there everything but the disk adds up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dzero.mesh import REPLICATE, SHARD
from dzero.offload.actions import update_order
from dzero.offload.places import Places
from dzero.plan.costs import BACKWARD, FORWARD, Costs, Work
from dzero.plan.machine import HardwareConfig
from dzero.zero.account import expected_control, expected_traffic
from dzero.zero.layout import Layout
from dzero.zero.shapes import UnitShape
from dzero.zero.tiers import names_off_device

COMPUTE, UPDATE = "compute", "update"
HOST_LINK, HOST_UPDATE, DISK = "host link", "host update", "disk"


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
    moved, rates = moved_of(layout, units), _Rates(layout, hardware)
    away = names_off_device(layout.tiers, units)["master"]
    elems = dict.fromkeys((False, True), 0)  # whose master is off the device
    for unit in units:
        for param in unit.params:
            elems[param.name in away] += param.shard_elems(layout.shard) if param.trainable else 0
    parts = {way: layout.microbatches * rates.compute_s(costs.work(way)) for way in (FORWARD, BACKWARD)}
    seconds = {
        COMPUTE: sum(parts.values()),
        **rates.axes_s(moved, units),
        UPDATE: rates.device_update_s(elems[False]),
        HOST_LINK: rates.over(max(moved.out, moved.back), "host_link"),
        HOST_UPDATE: rates.over(elems[True], "update_elems_per_s"),
        DISK: rates.over(moved.read, "disk_read") + rates.over(moved.written, "disk_write"),
    }
    if hardware.devices_are_host:
        step = max(sum(seconds.values()) - seconds[DISK], seconds[DISK])
    else:
        train = max(seconds[each] for each in (COMPUTE, SHARD, REPLICATE, HOST_LINK))
        update = max(seconds[HOST_UPDATE], seconds[DISK], seconds[HOST_LINK] if away else 0.0)
        forward = train * parts[FORWARD] / seconds[COMPUTE] if seconds[COMPUTE] else 0.0
        beside = {"step": 0.0, "forward": forward}.get(layout.offload.mode, train)
        step = train + seconds[UPDATE] + max(0.0, update - beside)
    bound = max(seconds, key=lambda what: seconds[what])
    taken = {what: each for what, each in seconds.items() if each}
    return Pace(taken, None if rates.unknown else step, bound, tuple(dict.fromkeys(rates.unknown)))


class _Rates:
    """Of one rank; collects the figures in `unknown` that are asked for and that the hardware lacks."""

    def __init__(self, layout: Layout, hardware: HardwareConfig) -> None:
        self._layout, self._hardware = layout, hardware
        self._share = hardware.share(layout.ranks)
        self.unknown: list[str] = []

    def over(self, work: float, figure: str) -> float:
        """Seconds at a figure of this rank's share of its node."""
        return self._over(work, getattr(self._share, figure), figure)

    def compute_s(self, work: Work) -> float:
        """A GPU works while the program tells it what comes next; a CPU is the program's too."""
        flops = self._hardware.reachable_flops(self._layout.param.dtype)
        attention = self._hardware.attention_flops
        device_s = self._over(work.flops, flops, "flops")
        device_s += self._over(work.attention, min(filter(None, (attention, flops)), default=None), "flops")
        device_s += self._over(work.bytes, self._hardware.device_bandwidth, "device_bandwidth")
        program_s = work.calls * self._hardware.operator_s
        return device_s + program_s if self._hardware.devices_are_host else max(device_s, program_s)

    def axes_s(self, moved: Moved, units: Sequence[UnitShape]) -> dict[str, float]:
        """Of the collectives along each axis, decisions included."""
        layout, seconds = self._layout, {SHARD: 0.0, REPLICATE: 0.0}
        stride, degree = {SHARD: 1, REPLICATE: layout.shard}, {SHARD: layout.shard, REPLICATE: layout.replicate}
        calls = dict(moved.calls)
        for entry, traffic in expected_control(layout, units).items():
            calls[entry.axis] = calls.get(entry.axis, 0) + traffic.calls
        for axis, count in calls.items():
            link = self._hardware.link(degree[axis], stride=stride[axis], world=layout.ranks)
            seconds[axis] = self._over(moved.axes.get(axis, 0), link, "node_link or network")
            seconds[axis] += count * self._hardware.collective_latency_s
        return seconds

    def device_update_s(self, elems: int) -> float:
        """Of parameters whose states are on the device: all are read, all but gradients written."""
        if self._hardware.devices_are_host:
            return self.over(elems, "update_elems_per_s")
        layout = self._layout
        states = 2 * layout.master.dtype.itemsize + 4 * layout.moments.dtype.itemsize
        count = elems * (states + layout.grad.dtype.itemsize + layout.param.dtype.itemsize)
        return self._over(count, self._hardware.device_bandwidth, "device_bandwidth")

    def _over(self, work: float, rate: float | None, figure: str) -> float:
        if work and rate is None:
            self.unknown.append(figure)
        return work / rate if work and rate else 0.0
