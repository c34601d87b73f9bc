"""This machine as a `HardwareConfig`: measured once by the ranks of a run on it, then read from a cache.

    found(ranks)      the cached figures, or measures them now (under half a minute)
    cached(ranks)     the cached figures, or None
    measured(ranks)   measures them now, and caches them
    unmeasured(...)   its memory only

A rank has the threads and cores that it has in training, and all ranks work at the same time, so what they share
(cores, memory, caches) is shared as in a run. Peaks of listed GPUs are their datasheet's, with the efficiency that was
reached; elsewhere the peak is what was reached.
"""

from __future__ import annotations

import platform
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from dzero.errors import RunError
from dzero.estimate import measurement_cache
from dzero.estimate.hardware_spec import FLOPS, HardwareConfig
from dzero.estimate.measurement_cache import DamagedCache, Measurement, MeasurementKey
from dzero.estimate.probes import Effort, RankFigures, probe
from dzero.hardware import available_cores, dtype_of, host_memory_bytes, peak_flops_of
from dzero.launch.config import LauncherConfig, launched
from dzero.launch.devices import device_type, worker_count
from dzero.launch.launcher import start
from dzero.utils.scratch_paths import try_folder

CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """What every rank is told. disk: a directory on the disk that is measured."""

    launch: LauncherConfig
    disk: str = "."
    effort: Effort = field(default_factory=Effort)


def found(ranks: int | None = None, *, disk: str = ".") -> HardwareConfig:
    """This machine with so many ranks (None: as many as a run takes), measured now if it never was.

    Raises RunError where it would have to be measured under torchrun, and as `measured` does.
    """
    known = cached(ranks)
    return (known or measured(ranks, disk=disk)).hardware


def cached(ranks: int | None = None) -> Measurement | None:
    """The measurement of this machine, None where there is none. A damaged one is told and left aside."""
    try:
        return measurement_cache.load(key_of(ranks))
    except (DamagedCache, OSError) as error:
        print(f"{error}; it counts as none, and the next measurement replaces it", file=sys.stderr)
        return None


def unmeasured(ranks: int, device_type: str) -> HardwareConfig:
    """This machine as far as it need not be measured: memory, no rates."""
    host_bytes, on_gpu = host_memory_bytes(), device_type == "cuda"
    return HardwareConfig.of_sizes(
        torch.cuda.get_device_name() if on_gpu else _cpu_model(),
        device_type,
        ranks,
        device_bytes=torch.cuda.mem_get_info()[1] if on_gpu else host_bytes // ranks,
        host_bytes=host_bytes,
    )


def measured(ranks: int | None = None, *, disk: str = ".", effort: Effort | None = None) -> Measurement:
    """Measure this machine with so many ranks, all of them working, and cache it.

    Raises RunError under torchrun, where ranks belong to a run already, and for a rank that fails.
    """
    if launched():
        raise RunError(
            "this machine is not measured yet, and torchrun's ranks are a run's: first run, without torchrun, "
            "python -m dzero hardware"
        )
    launch = LauncherConfig(workers=ranks)
    try_folder(disk)
    with tempfile.TemporaryDirectory(prefix="dzero-hardware-") as folder:
        run = ProbeConfig(launch=launch, disk=disk, effort=effort or Effort())
        start(_measure, run, Path(folder), workers=worker_count(launch))
        files = [Path(folder, f"{rank}.json") for rank in range(worker_count(launch))]
        each = [msgspec.json.decode(file.read_bytes(), type=RankFigures) for file in files]
    key = key_of(ranks)
    measurement = combine(key, each, disk_bytes=shutil.disk_usage(disk).free)
    try:
        measurement_cache.store(measurement)
    except OSError as error:
        print(f"the measurement could not be cached: {error}", file=sys.stderr)
    return measurement


def _measure(config: ProbeConfig, folder: Path, device: torch.device) -> None:
    """On every rank: its figures into `folder`."""
    figures = probe(device, config.disk, config.effort)
    (folder / f"{dist.get_rank()}.json").write_bytes(msgspec.json.encode(figures))


def key_of(ranks: int | None = None) -> MeasurementKey:
    """What a measurement holds for: this machine's processor, cores and devices, torch, and the number of ranks."""
    launch = LauncherConfig(workers=ranks)
    on_gpu = device_type(launch) == "cuda"
    return MeasurementKey(
        cpu=_cpu_model(),
        cores=available_cores(),
        host_bytes=host_memory_bytes(),
        device_type=device_type(launch),
        device=torch.cuda.get_device_name(0) if on_gpu else "",
        ranks=worker_count(launch),
        torch=str(torch.__version__),
    )


def _cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def combine(key: MeasurementKey, each: Sequence[RankFigures], *, disk_bytes: int) -> Measurement:
    """The ranks' figures as those of the node: the slowest rank of what each has, the sum of what they share."""
    slowest = {name: min(getattr(rank, f"{name}_flops") for rank in each) for name in FLOPS}
    listed = {name: peak_flops_of(key.device, dtype_of(name)) for name in FLOPS}
    half = next((name for name in FLOPS if listed[name] is not None), None)
    peaks = {name: listed[name] if half else slowest[name] for name in FLOPS}
    peak = peaks[half] if half else None
    first = each[0]
    assert first.link_alone is not None, "the first rank copies alone"
    links = [rank.exchange.link for rank in each if rank.exchange.link is not None]
    hardware = HardwareConfig(
        name=f"{key.device or key.cpu}, {key.cores} cores, {key.ranks} rank{'s' * (key.ranks > 1)}",
        device_type=key.device_type,
        devices_per_node=key.ranks,
        device_bytes=min(rank.device_bytes for rank in each),
        reserved_bytes=max(rank.reserved_bytes for rank in each),
        bf16_flops=peaks["bf16"],
        fp16_flops=peaks["fp16"],
        fp32_flops=peaks["fp32"],
        efficiency=min(1.0, slowest[half] / peak) if half and peak else 1.0,
        attention_flops=min(rank.operators.attention for rank in each),
        operator_s=max(rank.operators.operator_s for rank in each),
        device_bandwidth=min(rank.operators.bandwidth for rank in each),
        host_link=first.link_alone,
        host_bandwidth=sum(rank.link for rank in each) if key.ranks > 1 else None,
        node_link=min(links, default=None),
        network=None,
        collective_latency_s=max(rank.exchange.latency_s for rank in each),
        host_bytes=key.host_bytes,
        disk_bytes=disk_bytes,
        disk_read=first.disk_read,
        disk_write=first.disk_write,
        host_memory_bandwidth=sum(rank.update_bandwidth for rank in each),
        update_elems_per_s=sum(rank.update_elems_per_s for rank in each),
    )
    return Measurement(key=key, when=measurement_cache.now(), hardware=hardware)
