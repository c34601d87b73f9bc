"""A node and its network in figures: what every prediction of bytes and seconds is made from.

    what                     of one device         of the whole node        between devices        times
    memory                   device_bytes          host_bytes, disk_bytes
    work per second          <dtype>_flops                                                         efficiency
                             attention_flops       update_elems_per_s
    seconds of a call        operator_s                                     collective_latency_s
    bytes per second         device_bandwidth      host_memory_bandwidth                           memory_efficiency
      to host memory         host_link             host_bandwidth           node_link, network     link_efficiency
      to scratch disks                             disk_read, disk_write

Rates are a datasheet's, and the efficiency in the last column is the part of them that training reaches: an assumption
of each node's file, with its source. Where a machine was measured the rates are what was reached and the efficiency
is 1, except for listed GPUs, whose peak stays the datasheet's. Figures without an efficiency are what is reached.
Rates hold for large pieces, in one direction while the other is as busy. None is *unknown*: what needs the figure
cannot be predicted, and says so. The exception is a peak of None for a dtype that the device has no units for. Pure:
nothing is measured here (`estimate/measure_hardware.py` does).
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
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Dtypes that have a peak, by torch's own names: this file does without torch."""
MOST_RATE = 1e18
MOST = {"bytes": 8.0 * MOST_BYTES, "node": float(MOST_RANKS)}
"""Of what a figure counts, by the end of its name; all others are rates."""
MAY_BE_ZERO = ("reserved_bytes", "operator_s", "collective_latency_s", "disk_bytes")
EFFICIENCIES = ("efficiency", "memory_efficiency", "link_efficiency")


@dataclass(frozen=True)
class RankShare:
    """What one rank has of its node while all ranks of the node are busy; None where the node's figure is unknown.

    Bytes of capacity, bytes per second (`host_link` each way; `host_memory` reads and writes together), and elements
    per second of the host's update.
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
    """One node and its network, for predictions; bytes are bytes (not GiB), rates bytes/s or FLOP/s.

    None is unknown: what needs the figure cannot be predicted, and says so. A peak of None is a dtype without units.
    """

    name: str
    """What the node is called."""
    device_type: str = "cuda"
    """cuda; or cpu, where a device is a rank's part of the node's memory."""
    devices_per_node: int
    """Devices, and so ranks, of one node."""
    device_bytes: int
    """Memory of one device, as the driver tells it."""
    reserved_bytes: int
    """Part of it that the driver's context, libraries and the allocator's rounding take."""
    bf16_flops: float | None
    """Dense bf16 peak of one device, products summed in fp32."""
    fp16_flops: float | None
    """Dense fp16 peak of one device, products summed in fp32."""
    fp32_flops: float | None
    """Dense fp32 peak of one device."""
    efficiency: float
    """Part of the peak that matrix products reach in training, (0, 1]."""
    memory_efficiency: float = 1.0
    """Part of device_bandwidth and host_memory_bandwidth that is reached, (0, 1]."""
    link_efficiency: float = 1.0
    """Part of host_link, host_bandwidth, node_link and network that is reached, (0, 1]."""
    attention_flops: float | None
    """What causal attention reaches on one device, all products counted."""
    operator_s: float
    """Seconds of an operator on little data."""
    device_bandwidth: float | None
    """Memory bandwidth of one device, reads and writes together."""
    host_link: float | None
    """Link of one device to host memory, each way."""
    host_bandwidth: float | None = None
    """Links of all devices of a node to host memory together, each way. null: they do not limit each other."""
    node_link: float | None
    """Link of one device within its node, each direction."""
    network: float | None
    """Link of one device out of its node, each direction."""
    collective_latency_s: float
    """Seconds of a small collective, beside the time that its bytes take."""
    host_bytes: int | None
    """Host memory of the node."""
    disk_bytes: int | None
    """Scratch space of the node."""
    disk_read: float | None
    """Read bandwidth of all scratch disks of the node together."""
    disk_write: float | None
    """Write bandwidth of all scratch disks of the node together."""
    host_memory_bandwidth: float | None
    """Bandwidth of host memory, reads and writes together, as the host's update uses it."""
    update_elems_per_s: float | None
    """Parameters per second that the host's cores update at the most, however few their bytes."""

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
        """A node of `ranks` devices whose rates are unknown."""
        unknown: dict[str, Any] = {item.name: None for item in fields(cls) if "None" in str(item.type)}
        sizes = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes, "reserved_bytes": 0}
        free = {"efficiency": 1.0, "operator_s": 0.0, "collective_latency_s": 0.0}
        return cls(**{**unknown, **sizes, **free, "name": name, "device_type": device_type, "devices_per_node": ranks})

    @property
    def reaches_its_rates(self) -> bool:
        """True where no efficiency is assumed: rates are what was measured."""
        return all(getattr(self, name) == 1.0 for name in EFFICIENCIES)

    def at_datasheet_rates(self) -> HardwareConfig:
        """Return the node as its datasheets promise it: every rate in full, and no time for calls.

        On a CPU calls keep their time: they are work of the cores like any other.
        """
        changed: dict[str, Any] = dict.fromkeys(EFFICIENCIES, 1.0)
        if not self.devices_are_host:
            changed |= {"operator_s": 0.0, "collective_latency_s": 0.0}
        return replace(self, **changed)

    @property
    def devices_are_host(self) -> bool:
        """Device and host memory are the same memory: bytes of both tiers add up against `host_bytes`."""
        return self.device_type == "cpu"

    @property
    def usable_bytes(self) -> int:
        """Of one device's memory, what tensors can have."""
        return self.device_bytes - self.reserved_bytes

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense peak of one device in FLOP/s; None without units for `dtype`, or unknown."""
        name = NAMES.get(str(dtype).removeprefix("torch."))
        return None if name is None else getattr(self, f"{name}_flops")

    def reachable_flops(self, dtype: torch.dtype) -> float | None:
        """`peak_flops` x `efficiency`: FLOP/s of matrix products."""
        return _times(self.peak_flops(dtype), self.efficiency)

    @property
    def reachable_bandwidth(self) -> float | None:
        """Bytes/s of one device's memory, as operators reach it that are no products."""
        return _times(self.device_bandwidth, self.memory_efficiency)

    def nodes(self, ranks: int) -> int:
        """Nodes that `ranks` ranks take."""
        return -(-ranks // self.devices_per_node)

    def local_ranks(self, ranks: int) -> int:
        """Ranks of the fullest node."""
        return min(ranks, self.devices_per_node)

    def within_node(self, ranks: int, *, stride: int = 1, world: int | None = None) -> bool:
        """Whether every group of `ranks` ranks, each `stride` from the next, lies in one node.

        world: ranks in all, None for one such group. Ranks fill node after node, and groups begin at multiples of
        `ranks` x `stride`, as those of a mesh do (stride 1: the shard axis; stride = shard: the replicate axis).
        """
        span = ranks * stride
        return max(world or span, span) <= self.devices_per_node or self.devices_per_node % span == 0 or ranks == 1

    def link(self, ranks: int, *, stride: int = 1, world: int | None = None) -> float | None:
        """Bytes/s of one device, each direction, that a collective of such a group reaches: of `node_link`; where a
        group crosses nodes, no more than its members in a node bring out of it together. None: unknown.

        Rings run through all of a node before they leave it, and each leaves by another device's port, so what leaves
        is shared by as many ports as the group has members in a node.
        """
        inside, outside = (_times(rate, self.link_efficiency) for rate in (self.node_link, self.network))
        if self.within_node(ranks, stride=stride, world=world):
            return inside
        if outside is None:
            return None
        members = max(1, math.gcd(ranks * stride, self.devices_per_node) // stride)
        if members == 1:
            return outside
        return None if inside is None else min(inside, members * outside)

    def share(self, ranks: int) -> RankShare:
        """What one of `ranks` ranks has of its node; of `host_link` no more than its part of `host_bandwidth`."""
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
