"""Output of `python -m dzero hardware`: this machine's figures, their age, and a file for conf/hardware."""

from __future__ import annotations

import json
from dataclasses import fields

from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.measurement_cache import Measurement
from dzero.hardware import format_bytes, format_count, format_seconds
from dzero.utils.terminal import Table

MEANING = {
    "devices_per_node": "ranks",
    "device_bytes": "memory of one device",
    "reserved_bytes": "of that, context and libraries",
    "bf16_flops": "peak of one device, bf16",
    "fp16_flops": "peak of one device, fp16",
    "fp32_flops": "peak of one device, fp32",
    "fp8_flops": "peak of one device, fp8",
    "efficiency": "of the peak, reached by matrix products",
    "memory_efficiency": "of memory's bandwidth, reached",
    "link_efficiency": "of the links' rates, reached",
    "attention_flops": "reached by attention, bf16",
    "operator_s": "of an operator on little data",
    "device_bandwidth": "memory of one device, read and written",
    "host_link": "copy between host and one device, alone",
    "host_bandwidth": "of all devices at once",
    "node_link": "collectives, of each rank",
    "network": "collectives across nodes, of each rank",
    "collective_latency_s": "of a small collective",
    "host_bytes": "host memory",
    "disk_bytes": "scratch disk, free then",
    "disk_read": "scratch disk, read",
    "disk_write": "scratch disk, written",
    "host_memory_bandwidth": "host memory, as the host's update reads and writes it",
    "update_elems_per_s": "parameters the host updates per second, at the most",
}


def machine_table(measurement: Measurement) -> Table:
    """Return a table with a row for each figure."""
    hardware = measurement.hardware
    rows = [(meaning, figure, text(figure, getattr(hardware, figure))) for figure, meaning in MEANING.items()]
    disks = ", ".join(measurement.key.disks)
    title = (
        f"{hardware.name}, scratch at {disks}, measured {measurement.when:%Y-%m-%d %H:%M} UTC, {age(measurement.age_s)}"
    )
    return Table(title, ("figure", "setting", "value"), tuple(rows), left=2)


def age(seconds: float) -> str:
    """Return an age in words: `just now`, `4:05 ago`, or from two days on `3 days ago`."""
    if seconds < 60:
        return "just now"
    days = int(seconds // 86400)
    return f"{days} days ago" if days >= 2 else f"{format_seconds(seconds)} ago"


def text(figure: str, value: float | None) -> str:
    """Return a figure of HardwareConfig with its unit; `unknown` for None."""
    if value is None:
        return "unknown"
    if figure.endswith("_bytes"):
        return format_bytes(value)
    if figure.endswith("_flops"):
        return f"{format_count(value)}FLOP/s"
    if figure.endswith("_s") and not figure.endswith("_per_s"):
        return format_seconds(value) if value else "0 s"
    if figure.endswith("_per_s"):
        return f"{format_count(value)}/s"
    return (
        f"{value:g}" if figure.endswith("efficiency") or figure == "devices_per_node" else f"{format_count(value)}B/s"
    )


def as_yaml(measurement: Measurement) -> str:
    """Return the figures as a file of conf/hardware, with rates to three digits."""
    hardware = measurement.hardware
    lines = [f"# measured {measurement.when:%Y-%m-%d} with torch {measurement.key.torch}"]
    return "\n".join(lines + [f"{item.name}: {_value(hardware, item.name)}" for item in fields(hardware)])


def _value(hardware: HardwareConfig, figure: str) -> str:
    value = getattr(hardware, figure)
    if isinstance(value, float):
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    return "null" if value is None else json.dumps(value)
