"""Seconds of each piece of a step on given hardware; `step_time.py` adds them up, `timeline.py` orders them.

    piece                  work                                  rate
    operators of a unit    FLOPs and bytes                       reachable FLOP/s and bandwidth of the device, and a
                                                                 launch time for each operator
    collective             bytes sent along an axis              the axis' link, plus a latency
    decision               number of collectives                 a latency each
    update on the device   bytes of states, gradients, weights   device bandwidth (on a CPU: as on the host)
    update on the host     the same bytes, and elements          the slower of the rank's share of host memory bandwidth
                                                                 and of the elements/s that the cores update
    copy, file transfer    bytes                                 the rank's share of its node's figures

Rates are those reached in training (`hardware_spec.py`). A lower bound uses datasheet rates instead, and counts no time
for the attention products that a causal mask skips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch

from dzero.comm.hops import Leg
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.operator_work import OperatorWork
from dzero.mesh import CONTEXT, EXPERT, PIPELINE, REPLICATE, SHARD, TENSOR, expert_degrees
from dzero.zero.cost_model import Legs
from dzero.zero.layout import Layout


class Link(NamedTuple):
    """Link of an axis: bytes/s of one device in each direction (None: unknown), and whether it stays within nodes."""

    rate: float | None
    within_node: bool


def of_experts(axis: str) -> str:
    """Return the name of an axis among the ranks that have the same experts."""
    return f"{axis}, experts"


def link_of(layout: Layout, hardware: HardwareConfig, axis: str, beside: Mapping[str, int]) -> Link:
    """Return the link of the collectives along `axis`, a mesh axis or `of_experts` of one; `beside` as in `axes_of`."""
    ranks, stride = axes_of(layout, beside)[axis]
    within_node = hardware.within_node(ranks, stride=stride, world=layout.world)
    return Link(hardware.link(ranks, stride=stride, world=layout.world), within_node)


def axes_of(layout: Layout, beside: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the ranks along each axis, and how far apart they are.

    Ranks along tp are neighbors. Ranks along shard are `layout.model_ranks` apart, and ranks along each further axis
    are a whole group of the axes before it apart. `beside` has the ranks along cp (neighbors among the data-parallel
    ranks) and along ep (neighbors, tp included).
    """
    inside = layout.model_ranks
    of_shards = inside * layout.shard
    axes = {TENSOR: (inside, 1), SHARD: (layout.shard, inside), REPLICATE: (layout.replicate, of_shards)}
    axes |= {CONTEXT: (beside.get(CONTEXT, 1), inside), EXPERT: (beside.get(EXPERT, 1), 1)}
    axes |= {PIPELINE: (layout.pipeline_ranks, of_shards * layout.replicate)}
    if (ep := beside.get(EXPERT, 1)) > 1:
        replicate, shard = expert_degrees(layout.replicate, layout.shard, ep, inside)
        axes |= {of_experts(SHARD): (shard, ep), of_experts(REPLICATE): (replicate, ep * shard)}
    return axes


CAUSAL = 2.0
"""Ratio of all attention products, which are counted, to those that a causal mask leaves."""


def update_bytes(layout: Layout) -> int:
    """Return the bytes that AdamW reads and writes per parameter, in the dtypes of `layout`.

    Master and moments are read and written, the gradient is read, and the working copy is written. If the master is a
    remainder, the working copy is read too, because it has the master's other bits. An fp32 parameter is its own
    master.
    """
    param, master = layout.param.dtype.itemsize, layout.master.dtype.itemsize
    own = not layout.remainder and layout.param.dtype == layout.master.dtype
    work = 0 if own else 2 * param if layout.remainder else param
    return 2 * master + 4 * layout.moments.dtype.itemsize + layout.grad.dtype.itemsize + work


class Durations:
    """Seconds of the pieces of a step, if `bound` at datasheet rates, for a lower bound.

    A piece that needs an unknown figure takes `nan` seconds, and `unknown` has the figure's name. `beside` has the
    ranks along cp and ep.
    """

    def __init__(
        self, layout: Layout, hardware: HardwareConfig, beside: Mapping[str, int], *, bound: bool = False
    ) -> None:
        hardware = hardware.at_datasheet_rates() if bound else hardware
        self._layout, self._hardware, self._share = layout, hardware, hardware.share(layout.world)
        self._axes = axes_of(layout, beside)
        self._links = {axis: link_of(layout, hardware, axis, beside).rate for axis in self._axes}
        self._flops = hardware.reachable_flops(layout.param.dtype)
        self._fp8_flops = hardware.reachable_flops(torch.float8_e4m3fn)
        known = [rate for rate in (hardware.attention_flops, self._flops) if rate is not None]
        self._attention = min(known) if self._flops is not None else None
        if bound and self._flops is not None and not hardware.devices_are_host:
            self._attention = CAUSAL * self._flops
        self.unknown: list[str] = []

    def compute(self, work: OperatorWork) -> float:
        """Return the seconds of operators.

        A GPU computes while the host launches the next operators, so the longer of both counts. On a CPU both add up.
        """
        device_s = self._over(work.flops, self._flops, "flops") + self._over(work.attention, self._attention, "flops")
        device_s += self._over(work.fp8_flops, self._fp8_flops, "fp8_flops")
        device_s += self._over(work.bytes, self._hardware.reachable_bandwidth, "device_bandwidth")
        program_s = work.calls * self._hardware.operator_s
        return device_s + program_s if self._hardware.devices_are_host else max(device_s, program_s)

    def sent(self, axis: str, count: int, calls: int = 1) -> float:
        """Return the seconds of `calls` collectives along `axis` that send `count` bytes in all."""
        return self._over(count, self._links[axis], "node_link or network") + self.decided(calls)

    def collective(self, axis: str, legs: Legs, calls: int = 1) -> float:
        """Return the seconds of `calls` collectives of units along `axis`, one leg after the other."""
        hops = len({(leg.ranks, leg.stride) for leg in legs})
        return calls * sum(self._leg(axis, leg) for leg in legs) + self.decided(calls * hops)

    def _leg(self, axis: str, leg: Leg) -> float:
        """Return the seconds of a leg. Exact ones send to every peer through the sender's own port, without a ring."""
        hardware, stride = self._hardware, leg.stride * self._axes[axis][1]
        is_ring = not self._layout.exact or hardware.within_node(leg.ranks, stride=stride, world=self._layout.world)
        if is_ring:
            rate = hardware.link(leg.ranks, stride=stride, world=self._layout.world)
            return self._over(leg.sent_bytes, rate, "node_link or network")
        members = hardware.members(leg.ranks, stride)
        outside = leg.sent_bytes * (leg.ranks - members) // (leg.ranks - 1)
        inside_s = self._over(leg.sent_bytes - outside, hardware.within_nodes, "node_link")
        return max(inside_s, self._over(outside, hardware.between_nodes, "network"))

    def decided(self, calls: int) -> float:
        """Return the seconds of `calls` collectives of a few numbers."""
        return calls * self._hardware.collective_latency_s

    def updated_on_device(self, elems: int) -> float:
        """Return the seconds to update `elems` parameters whose states are on the device."""
        if self._hardware.devices_are_host:
            return self.updated(elems)
        count = elems * update_bytes(self._layout)
        return self._over(count, self._hardware.reachable_bandwidth, "device_bandwidth")

    def decoded(self, count: int) -> float:
        """Return the seconds in which the device reads and writes `count` bytes to decode quantized weights."""
        return self._over(count, self._hardware.reachable_bandwidth, "device_bandwidth")

    def copied(self, count: int) -> float:
        """Return the seconds to copy `count` bytes between device and host, in either direction."""
        return self._over(count, self._share.host_link, "host_link")

    def updated(self, elems: int) -> float:
        """Return the seconds of the host's update of `elems` parameters: the longer of traffic and arithmetic."""
        count = elems * update_bytes(self._layout)
        memory_s = self._over(count, self._share.host_memory, "host_memory_bandwidth")
        return max(memory_s, self._over(elems, self._share.update_elems_per_s, "update_elems_per_s"))

    def encoded(self, count: int) -> float:
        """Return the seconds in which the host reads and writes `count` bytes to encode parameters."""
        return self._over(count, self._share.host_memory, "host_memory_bandwidth")

    def read(self, count: int) -> float:
        """Return the seconds to read `count` bytes from disk."""
        return self._over(count, self._share.disk_read, "disk_read")

    def written(self, count: int) -> float:
        """Return the seconds to write `count` bytes to disk."""
        return self._over(count, self._share.disk_write, "disk_write")

    def _over(self, work: float, rate: float | None, figure: str) -> float:
        if work and rate is None:
            self.unknown.append(figure)
            return math.nan
        return work / rate if work and rate else 0.0
