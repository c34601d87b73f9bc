"""A node and its network in figures: what every prediction of bytes and seconds is made from.

    what                     of one device         of the whole node        between devices
    memory                   device_bytes          host_bytes, disk_bytes
    work per second          <dtype>_flops         update_elems_per_s
                             attention_flops
    seconds of a call        operator_s                                     collective_latency_s
    bytes per second         device_bandwidth      host_bandwidth           node_link, network
      to host memory         host_link
      to scratch disks                             disk_read, disk_write

Rates hold for large pieces, in one direction while the other is as busy, and bandwidths are what transfers reach, not
what a connector is sold as. None is *unknown*: what needs the figure cannot be predicted, and says so. The exception is
a peak of None for a dtype that the device has no units for. Pure: nothing is measured here (`plan/measure.py` does).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch

from dzero.hardware import dtype_name

DEVICE_TYPES = ("cuda", "cpu")
FLOPS = ("bf16", "fp16", "fp32")
MAY_BE_ZERO = ("reserved_bytes", "operator_s", "collective_latency_s")


@dataclass(frozen=True)
class Share:
    """What one rank has of its node while all ranks of the node are busy; None where the node's figure is unknown.

    Bytes of capacity, bytes per second (`host_link` each way), and elements per second of the host's update.
    """

    host_bytes: int | None
    disk_bytes: int | None
    host_link: float | None
    disk_read: float | None
    disk_write: float | None
    update_elems_per_s: float | None


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """One node and its network. Bytes are bytes (not GiB), rates bytes/s or FLOP/s. See the module's table.

    name: how it is called. device_type: `cuda`; or `cpu`, where a device is a rank's part of the node's memory, and
    host memory is the same memory (`devices_are_host`).
    devices_per_node: devices, and so ranks, of one node. device_bytes: memory of one, as the driver tells it;
    reserved_bytes: of that, what the driver's context, libraries and the allocator's rounding take.
    <dtype>_flops: dense peak of one device, products summed in fp32. efficiency: the part of it that a large matrix
    product reaches, (0, 1]. attention_flops: what causal attention reaches, all products counted.
    operator_s: of an operator on little data, as the program is slowed by it. device_bandwidth: of one device's memory,
    reads and writes together, as operators reach it that are no products.
    host_link: of one device, each way, what a page-locked copy reaches alone; host_bandwidth: of all devices of a node
    together, each way, None where the links do not limit each other.
    node_link, network: of one device, each direction, within a node, and out of it through its own port (see `link`);
    collective_latency_s: of a small collective, over the time its bytes take.
    host_bytes, disk_bytes: memory and scratch space of the node. disk_read, disk_write: of all its disks together.
    update_elems_per_s: parameters per second that the whole host updates (bf16 gradient, fp32 AdamW states).
    """

    name: str
    device_type: str = "cuda"
    devices_per_node: int
    device_bytes: int
    reserved_bytes: int
    bf16_flops: float | None
    fp16_flops: float | None
    fp32_flops: float | None
    efficiency: float
    attention_flops: float | None
    operator_s: float
    device_bandwidth: float | None
    host_link: float | None
    host_bandwidth: float | None = None
    node_link: float | None
    network: float | None
    collective_latency_s: float
    host_bytes: int | None
    disk_bytes: int | None
    disk_read: float | None
    disk_write: float | None
    update_elems_per_s: float | None

    def __post_init__(self) -> None:
        if self.device_type not in DEVICE_TYPES:
            raise ValueError(f"hardware.device_type={self.device_type!r}: choose one of {list(DEVICE_TYPES)}")
        for item in fields(self):
            value = getattr(self, item.name)
            if value is None or isinstance(value, str):
                continue
            least = "≥ 0" if item.name in MAY_BE_ZERO else "> 0"
            if not math.isfinite(value) or value < 0 or (value == 0 and item.name not in MAY_BE_ZERO):
                unknown = ", or null where it is unknown" if "None" in str(item.type) else ""
                raise ValueError(f"hardware.{item.name}={value}: must be a number {least}{unknown}")
        if self.efficiency > 1:
            raise ValueError(f"hardware.efficiency={self.efficiency}: a part of the peak, must be in (0, 1]")
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
    def devices_are_host(self) -> bool:
        """Device and host memory are the same memory: bytes of both tiers add up against `host_bytes`."""
        return self.device_type == "cpu"

    @property
    def usable_bytes(self) -> int:
        """Of one device's memory, what tensors can have."""
        return self.device_bytes - self.reserved_bytes

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Dense peak of one device in FLOP/s; None without units for `dtype`, or unknown."""
        name = dtype_name(dtype)
        return getattr(self, f"{name}_flops") if name in FLOPS else None

    def reachable_flops(self, dtype: torch.dtype) -> float | None:
        """`peak_flops` x `efficiency`: FLOP/s of a large matrix product."""
        peak = self.peak_flops(dtype)
        return None if peak is None else peak * self.efficiency

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
        """Bytes/s of one device, each direction, in a collective of such a group: `node_link`; where a group crosses
        nodes, no more than its members in a node bring out of it together. None: unknown.

        Rings run through all of a node before they leave it, and each leaves by another device's port, so what leaves
        is shared by as many ports as the group has members in a node.
        """
        if self.within_node(ranks, stride=stride, world=world):
            return self.node_link
        if self.network is None:
            return None
        members = max(1, math.gcd(ranks * stride, self.devices_per_node) // stride)
        if members == 1:
            return self.network
        return None if self.node_link is None else min(self.node_link, members * self.network)

    def share(self, ranks: int) -> Share:
        """What one of `ranks` ranks has of its node; of `host_link` no more than its part of `host_bandwidth`."""
        local = self.local_ranks(ranks)

        def part(rate: float | None) -> float | None:
            return None if rate is None else rate / local

        links = [rate for rate in (self.host_link, part(self.host_bandwidth)) if rate is not None]
        return Share(
            host_bytes=None if self.host_bytes is None else self.host_bytes // local,
            disk_bytes=None if self.disk_bytes is None else self.disk_bytes // local,
            host_link=None if self.host_link is None else min(links),
            disk_read=part(self.disk_read),
            disk_write=part(self.disk_write),
            update_elems_per_s=part(self.update_elems_per_s),
        )
