"""Figures of a node and its network, from which bytes and seconds are predicted.

    figure                   per device            per node              between devices        factor
    memory                   device_bytes          host_bytes, disk_bytes
    work per second          <dtype>_flops                                                      efficiency
                             attention_flops       update_elems_per_s
    seconds per call         operator_s                                  collective_latency_s
    bytes per second         device_bandwidth      host_memory_bandwidth                        memory_efficiency
      to host memory         host_link             host_bandwidth        node_link, network     link_efficiency
      to scratch disks                             disk_read, disk_write

Rates are datasheet values. The efficiency in the last column is the fraction that training reaches, an assumption with
its source in each node's file (conf/hardware). On a measured machine the rates are those reached and the efficiency is
1, except for listed GPUs, whose peak stays the datasheet's. Figures without an efficiency are reached values. Rates
hold for large transfers in one direction while the other direction is equally busy.

None means unknown: what needs the figure is not predicted, and is reported as such. A peak of None may also mean that
the device has no units for that dtype. Nothing is measured here; see `estimate/measure_hardware.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from dzero.utils.ranges import MOST_BYTES, MOST_RANKS, Range, check

if TYPE_CHECKING:
    import torch

DEVICE_TYPES = ("cuda", "cpu")
FLOPS = ("bf16", "fp16", "fp32")
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float8_e4m3fn": "fp8"}
"""Dtypes that have a peak, by torch's names; this module does not import torch at run time."""
MOST_RATE = 1e18
MOST = {"bytes": 8.0 * MOST_BYTES, "node": float(MOST_RANKS)}
"""Upper limits of figures that count something, by the end of their names; all others are rates."""
MAY_BE_ZERO = ("reserved_bytes", "operator_s", "collective_latency_s", "disk_bytes")
EFFICIENCIES = ("efficiency", "memory_efficiency", "link_efficiency")


@dataclass(frozen=True)
class RankShare:
    """Share of a node that one rank has while all ranks of the node are busy; None if the node's figure is unknown.

    Rates are bytes/s (`host_link` in each direction, `host_memory` for reads and writes together) and elements/s.
    """

    host_bytes: int | None
    disk_bytes: int | None
    host_link: float | None
    disk_read: float | None
    disk_write: float | None
    host_memory: float | None
    update_elems_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """Node and network, for predictions; bytes are bytes (not GiB), rates are bytes/s or FLOP/s, None is unknown."""

    name: str
    """Name of the node."""
    device_type: str = "cuda"
    """cuda, or cpu, where a device is a rank's part of the node's memory."""
    devices_per_node: int
    """Devices, and therefore ranks, per node."""
    device_bytes: int
    """Memory of one device, as reported by the driver."""
    reserved_bytes: int
    """Part of it taken by the driver's context, libraries and the allocator's rounding."""
    bf16_flops: float | None
    """Dense bf16 peak of one device, with fp32 accumulation."""
    fp16_flops: float | None
    """Dense fp16 peak of one device, with fp32 accumulation."""
    fp32_flops: float | None
    """Dense fp32 peak of one device."""
    fp8_flops: float | None = None
    """Dense fp8 peak of one device, with fp32 accumulation. null: products in 8 bits are emulated."""
    efficiency: float
    """Fraction of the peak that matrix products reach in training, (0, 1]."""
    memory_efficiency: float = 1.0
    """Fraction of device_bandwidth and host_memory_bandwidth that is reached, (0, 1]."""
    link_efficiency: float = 1.0
    """Fraction of host_link, host_bandwidth, node_link and network that is reached, (0, 1]."""
    attention_flops: float | None
    """FLOP/s that causal attention reaches on one device, with all products counted."""
    operator_s: float
    """Seconds of an operator on little data."""
    device_bandwidth: float | None
    """Memory bandwidth of one device, reads and writes together."""
    host_link: float | None
    """Link of one device to host memory, in each direction."""
    host_bandwidth: float | None = None
    """Links of all devices of a node to host memory together, in each direction. null: they do not limit each other."""
    node_link: float | None
    """Link of one device within its node, in each direction."""
    network: float | None
    """Link of one device out of its node, in each direction."""
    collective_latency_s: float
    """Seconds of a small collective, besides the time of its bytes."""
    host_bytes: int | None
    """Host memory of the node."""
    disk_bytes: int | None
    """Scratch space of the node."""
    disk_read: float | None
    """Read bandwidth of all scratch disks of the node together."""
    disk_write: float | None
    """Write bandwidth of all scratch disks of the node together."""
    host_memory_bandwidth: float | None
    """Bandwidth of host memory in the host's update, reads and writes together."""
    update_elems_per_s: float | None
    """Limit of the parameters per second that the host's cores update, however few bytes they have."""

    def __post_init__(self) -> None:
        if self.device_type not in DEVICE_TYPES:
            raise ValueError(f"hardware.device_type={self.device_type!r}: choose one of {list(DEVICE_TYPES)}")
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or isinstance(value, str):
                continue
            unknown = "where it is unknown" if "None" in str(item.type) else ""
            allowed = Range(0.0, MOST.get(item.name.rpartition("_")[2], MOST_RATE), or_null=unknown)
            check("hardware", self, **{item.name: replace(allowed, above=item.name not in MAY_BE_ZERO)})
        for name in EFFICIENCIES:
            if getattr(self, name) > 1:
                raise ValueError(f"hardware.{name}={getattr(self, name)}: a part of the peak, must be in (0, 1]")
        if self.reserved_bytes >= self.device_bytes:
            raise ValueError(
                f"hardware.reserved_bytes={self.reserved_bytes}: must be less than "
                f"hardware.device_bytes={self.device_bytes}, of which it is a part"
            )

    @classmethod
    def of_sizes(
        cls,
        name: str,
        device_type: str,
        ranks: int,
        *,
        device_bytes: int,
        host_bytes: int,
        disk_bytes: int | None = None,
    ) -> HardwareConfig:
        """Return a node of `ranks` devices with known sizes and unknown rates."""
        unknown: dict[str, Any] = {item.name: None for item in fields(cls) if "None" in str(item.type)}
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes, "reserved_bytes": 0}
        free = {"efficiency": 1.0, "operator_s": 0.0, "collective_latency_s": 0.0}
        return cls(**{**unknown, **sizes, **free, "name": name, "device_type": device_type, "devices_per_node": ranks})

    @property
    def reaches_its_rates(self) -> bool:
        """Whether no efficiency is assumed, because the rates were measured."""
        return all(getattr(self, name) == 1.0 for name in EFFICIENCIES)

    def at_datasheet_rates(self) -> HardwareConfig:
        """Return the node with every rate in full and no time per call.

        On a CPU, calls keep their time, because the cores themselves execute them.
        """
        changed: dict[str, Any] = dict.fromkeys(EFFICIENCIES, 1.0)
        if not self.devices_are_host:
            changed |= {"operator_s": 0.0, "collective_latency_s": 0.0}
        return replace(self, **changed)

    @property
    def devices_are_host(self) -> bool:
        """Whether device and host share one memory, so that bytes of both tiers count against `host_bytes`."""
        return self.device_type == "cpu"

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device's memory that tensors can use."""
        return self.device_bytes - self.reserved_bytes

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Return the dense peak of one device in FLOP/s, or None if it is unknown or `dtype` has no units."""
        name = NAMES.get(str(dtype).removeprefix("torch."))
        return None if name is None else getattr(self, f"{name}_flops")

    def reachable_flops(self, dtype: torch.dtype) -> float | None:
        """Return the FLOP/s that matrix products reach: `peak_flops` times `efficiency`."""
        return _times(self.peak_flops(dtype), self.efficiency)

    @property
    def reachable_bandwidth(self) -> float | None:
        """Bytes/s of one device's memory that operators other than matrix products reach."""
        return _times(self.device_bandwidth, self.memory_efficiency)

    def nodes(self, ranks: int) -> int:
        """Return the number of nodes that `ranks` ranks need."""
        return -(-ranks // self.devices_per_node)

    def local_ranks(self, ranks: int) -> int:
        """Return the number of ranks on the fullest node."""
        return min(ranks, self.devices_per_node)

    def within_node(self, ranks: int, *, stride: int = 1, world: int | None = None) -> bool:
        """Return whether every group of `ranks`, of `world` in all (None: a single group), is within one node.

        Ranks fill node after node. Groups start at multiples of `ranks` x `stride`, as in a mesh; neighbors of a group
        are `stride` apart: 1 for the innermost axis, the size of the inner axes for others.
        """
        span = ranks * stride
        return max(world or span, span) <= self.devices_per_node or self.devices_per_node % span == 0 or ranks == 1

    def link(self, ranks: int, *, stride: int = 1, world: int | None = None) -> float | None:
        """Return the bytes/s of one device in each direction in a collective of such groups, or None if unknown.

        The arguments are those of `within_node`. Within a node the rate is that of `node_link`. A ring that crosses
        nodes runs through all members in a node before it leaves the node, and each ring leaves through the port of
        another device. The traffic between nodes is therefore shared by as many ports as the group has members in a
        node.
        """
        inside, outside = self.within_nodes, self.between_nodes
        if self.within_node(ranks, stride=stride, world=world):
            return inside
        if outside is None:
            return None
        members = self.members(ranks, stride)
        if members == 1:
            return outside
        return None if inside is None else min(inside, members * outside)

    @property
    def within_nodes(self) -> float | None:
        """Bytes/s of one device to others of its node that are reached."""
        return _times(self.node_link, self.link_efficiency)

    @property
    def between_nodes(self) -> float | None:
        """Bytes/s of one device to other nodes that are reached."""
        return _times(self.network, self.link_efficiency)

    def members(self, ranks: int, stride: int = 1) -> int:
        """Return how many of `ranks` ranks, `stride` apart, are on each of the nodes that they are on."""
        return max(1, math.gcd(ranks * stride, self.devices_per_node) // stride)

    def share(self, ranks: int) -> RankShare:
        """Return one rank's share of its node; its `host_link` is at most its part of `host_bandwidth`."""
        local = self.local_ranks(ranks)

        def part(rate: float | None) -> float | None:
            return None if rate is None else rate / local

        links = [rate for rate in (self.host_link, part(self.host_bandwidth)) if rate is not None]
        return RankShare(
            host_bytes=None if self.host_bytes is None else self.host_bytes // local,
            disk_bytes=None if self.disk_bytes is None else self.disk_bytes // local,
            host_link=None if self.host_link is None else min(links) * self.link_efficiency,
            disk_read=part(self.disk_read),
            disk_write=part(self.disk_write),
            host_memory=part(_times(self.host_memory_bandwidth, self.memory_efficiency)),
            update_elems_per_s=part(self.update_elems_per_s),
        )


def _times(rate: float | None, efficiency: float) -> float | None:
    return None if rate is None else rate * efficiency
