"""Seconds of each piece of a step on some hardware: what `step_time.py` adds up, and `timeline.py` puts in order.

piece                        work                                  over
a unit at work               its operators                        reachable FLOP/s and bandwidth of the device;
                                                                   beside it, a moment of the program for each
a collective                 bytes sent along an axis              the axis' link, after a latency
a decision                                                         a latency
an update on the device      bytes of states, gradients, weights   its bandwidth (a CPU: as on the host)
an update on the host        the same; and elements                the rank's share of host memory's bandwidth, and of
                                                                   what the cores update, whichever takes longer
a copy, a file               bytes                                 the rank's share of its node's figures

Rates are those that training reaches (hardware_spec.py). For a lower bound they are the datasheet's instead, and the
products that a causal mask leaves out of attention take no time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.operator_work import OperatorWork
from dzero.mesh import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR, expert_degrees
from dzero.zero.layout import Layout


class Link(NamedTuple):
    """Of the collectives along an axis. rate: bytes/s of one device, each direction; None: unknown."""

    rate: float | None
    within_node: bool


def of_experts(axis: str) -> str:
    """What the axis is called among the ranks that have the same experts."""
    return f"{axis}, experts"


def link_of(layout: Layout, hardware: HardwareConfig, axis: str, beside: Mapping[str, int]) -> Link:
    """Ranks that share a model are next to each other, those that shard a whole group of them apart, and so on.

    beside: ranks to a sequence (cp), neighbours of those that shard or have copies; and to a set of experts (ep), with
    those that share a model among them.
    """
    inside = layout.model_ranks
    of_shards = inside * layout.shard
    axes = {TENSOR: (inside, 1), SHARD: (layout.shard, inside), REPLICATE: (layout.replicate, of_shards)}
    axes |= {CONTEXT: (beside.get(CONTEXT, 1), inside), EXPERT: (beside.get(EXPERT, 1), 1)}
    axes |= {PIPELINE: (layout.pipeline_ranks, of_shards * layout.replicate)}
    if (ep := beside.get(EXPERT, 1)) > 1:
        replicate, shard = expert_degrees(layout.replicate, layout.shard, ep, inside)
        axes |= {of_experts(SHARD): (shard, ep), of_experts(REPLICATE): (replicate, ep * shard)}
    ranks, stride = axes[axis]
    within_node = hardware.within_node(ranks, stride=stride, world=layout.world)
    return Link(hardware.link(ranks, stride=stride, world=layout.world), within_node)


CAUSAL = 2.0
"""All of attention's products are counted, of which a causal mask leaves this part: 1 in so many."""


def update_bytes(layout: Layout) -> int:
    """Return the bytes that AdamW reads and writes per parameter, in the dtypes of `layout`.

    Master and moments are read and written, the gradient is read, the working copy written; where the master is a
    remainder, the working copy holds its other bits and is read too; an fp32 parameter is its own master.
    """
    param, master = layout.param.dtype.itemsize, layout.master.dtype.itemsize
    own = not layout.remainder and layout.param.dtype == layout.master.dtype
    work = 0 if own else 2 * param if layout.remainder else param
    return 2 * master + 4 * layout.moments.dtype.itemsize + layout.grad.dtype.itemsize + work


class Durations:
    """On `hardware`; beside: ranks along cp and ep. bound: at the rates of its datasheets.

    `unknown`: figures that were asked for and that it lacks; what needs one takes `nan` seconds.
    """

    def __init__(
        self, layout: Layout, hardware: HardwareConfig, beside: Mapping[str, int], *, bound: bool = False
    ) -> None:
        hardware = hardware.at_datasheet_rates() if bound else hardware
        self._layout, self._hardware, self._share = layout, hardware, hardware.share(layout.world)
        axes = [TENSOR, CONTEXT, EXPERT, SHARD, REPLICATE, PIPELINE]
        axes += [of_experts(SHARD), of_experts(REPLICATE)] if beside.get(EXPERT, 1) > 1 else []
        self._links = {axis: link_of(layout, hardware, axis, beside).rate for axis in axes}
        self._flops = hardware.reachable_flops(layout.param.dtype)
        known = [rate for rate in (hardware.attention_flops, self._flops) if rate is not None]
        self._attention = min(known) if self._flops is not None else None
        if bound and self._flops is not None and not hardware.devices_are_host:
            self._attention = CAUSAL * self._flops
        self.unknown: list[str] = []

    def compute(self, work: OperatorWork) -> float:
        """A GPU works while the program tells it what comes next; a CPU is the program's too."""
        device_s = self._over(work.flops, self._flops, "flops") + self._over(work.attention, self._attention, "flops")
        device_s += self._over(work.bytes, self._hardware.reachable_bandwidth, "device_bandwidth")
        program_s = work.calls * self._hardware.operator_s
        return device_s + program_s if self._hardware.devices_are_host else max(device_s, program_s)

    def sent(self, axis: str, count: int, calls: int = 1) -> float:
        """Of collectives along an axis that send `count` bytes."""
        return self._over(count, self._links[axis], "node_link or network") + self.decided(calls)

    def decided(self, calls: int) -> float:
        """Of collectives of a few numbers."""
        return calls * self._hardware.collective_latency_s

    def updated_on_device(self, elems: int) -> float:
        """Return the seconds of the update of `elems` parameters whose states are on the device."""
        if self._hardware.devices_are_host:
            return self.updated(elems)
        count = elems * update_bytes(self._layout)
        return self._over(count, self._hardware.reachable_bandwidth, "device_bandwidth")

    def copied(self, count: int) -> float:
        """Of bytes between device and host, either way."""
        return self._over(count, self._share.host_link, "host_link")

    def updated(self, elems: int) -> float:
        """Return the seconds of the host's update of `elems` parameters: of its bytes or its arithmetic."""
        count = elems * update_bytes(self._layout)
        memory_s = self._over(count, self._share.host_memory, "host_memory_bandwidth")
        return max(memory_s, self._over(elems, self._share.update_elems_per_s, "update_elems_per_s"))

    def read(self, count: int) -> float:
        """Of bytes from disk."""
        return self._over(count, self._share.disk_read, "disk_read")

    def written(self, count: int) -> float:
        """Of bytes to disk."""
        return self._over(count, self._share.disk_write, "disk_write")

    def _over(self, work: float, rate: float | None, figure: str) -> float:
        if work and rate is None:
            self.unknown.append(figure)
            return math.nan
        return work / rate if work and rate else 0.0
