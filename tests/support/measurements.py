"""A measurement made up, with the key of no machine."""

from __future__ import annotations

from datetime import UTC, datetime

from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.measurement_cache import Measurement, MeasurementKey

KEY = MeasurementKey(
    cpu="abacus",
    cores=2,
    host_bytes=16 << 30,
    device_type="cpu",
    device="",
    ranks=2,
    torch="2.13.0",
    disks=("/scratch",),
)
HARDWARE = HardwareConfig(
    name="abacus",
    device_type="cpu",
    devices_per_node=2,
    device_bytes=8 << 30,
    reserved_bytes=300 << 20,
    bf16_flops=1.5e11,
    fp16_flops=2e9,
    fp32_flops=5e10,
    efficiency=1.0,
    attention_flops=5e10,
    operator_s=3e-6,
    device_bandwidth=2e10,
    host_link=1e10,
    host_bandwidth=1.5e10,
    node_link=1e9,
    network=None,
    collective_latency_s=2e-4,
    host_bytes=16 << 30,
    disk_bytes=100 << 30,
    disk_read=3e9,
    disk_write=2e9,
    host_memory_bandwidth=1.68e10,
    update_elems_per_s=8e8,
)
MEASUREMENT = Measurement(key=KEY, when=datetime(2026, 1, 1, tzinfo=UTC), hardware=HARDWARE)
