"""Measurement of this machine as a `HardwareConfig`, taken once by the ranks of a run and then read from a cache.

    cached(ranks, disks)     cached figures, or None
    measured(ranks, disks)   new measurement (under half a minute), which is cached
    unmeasured(...)          memory sizes only

Each rank has the threads and cores that it has in training, and all ranks are measured at the same time. Shared
resources (cores, memory, caches) are therefore shared as in a run. Peaks of listed GPUs are those of the datasheet,
with the efficiency that was reached; otherwise the peak is what was reached.
"""

from __future__ import annotations

import platform
import shlex
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
from dzero.launch.config import LauncherConfig
from dzero.launch.devices import device_type, worker_count
from dzero.launch.launcher import start
from dzero.utils.launched import launched
from dzero.utils.scratch_paths import mount_point, try_folder

CPU_INFO = Path("/proc/cpuinfo")
HERE = (".",)
"""Directories on the disks that are measured if none are named."""


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Settings that every probing rank receives; `disks` has a directory on each disk to measure."""

    launch: LauncherConfig
    disks: list[str]
    effort: Effort = field(default_factory=Effort)


def cached(ranks: int | None = None, disks: Sequence[str] = HERE) -> Measurement | None:
    """Return the cached measurement of this machine and the disks of directories, which may be missing, or None.

    A damaged measurement is reported and ignored.
    """
    try:
        return measurement_cache.load(key_of(ranks, disks))
    except (DamagedCache, OSError) as error:
        print(f"{error}; it counts as none, and the next measurement replaces it", file=sys.stderr)
        return None


def unmeasured(ranks: int, device_type: str) -> HardwareConfig:
    """Return this machine with its memory sizes and unknown rates."""
    host_bytes, on_gpu = host_memory_bytes(), device_type == "cuda"
    return HardwareConfig.of_sizes(
        torch.cuda.get_device_name() if on_gpu else _cpu_model(),
        device_type,
        ranks,
        device_bytes=torch.cuda.mem_get_info()[1] if on_gpu else host_bytes // ranks,
        host_bytes=host_bytes,
    )


def measured(ranks: int | None = None, disks: Sequence[str] = HERE, *, effort: Effort | None = None) -> Measurement:
    """Measure this machine and the disks of directories, with as many ranks busy as a run has, and cache the result.

    The figures of several disks are sums, in which directories of one disk count once.

    Raises:
        DiskError: No file can be created in a directory.
        RunError: A rank fails, or torchrun started this process, whose ranks belong to a run.
    """
    key = key_of(ranks, disks)
    if launched():
        named = "" if tuple(disks) == HERE else f" --disk {shlex.join(disks)}"
        raise RunError(
            f"this machine, with the disk of {', '.join(key.disks)}, is not measured yet, and torchrun's ranks are a "
            f"run's: first run, without torchrun, python -m dzero hardware{named}"
        )
    launch = LauncherConfig(workers=ranks)
    for disk in disks:
        try_folder(disk)
    each_disk = [*{mount_point(disk): disk for disk in disks}.values()]
    with tempfile.TemporaryDirectory(prefix="dzero-hardware-") as folder:
        run = ProbeConfig(launch=launch, disks=each_disk, effort=effort or Effort())
        start(_measure, run, Path(folder), workers=worker_count(launch))
        files = [Path(folder, f"{rank}.json") for rank in range(worker_count(launch))]
        each = [msgspec.json.decode(file.read_bytes(), type=RankFigures) for file in files]
    measurement = combine(key, each, disk_bytes=sum(shutil.disk_usage(disk).free for disk in each_disk))
    try:
        measurement_cache.store(measurement)
    except OSError as error:
        print(f"the measurement could not be cached: {error}", file=sys.stderr)
    return measurement


def _measure(config: ProbeConfig, folder: Path, device: torch.device) -> None:
    """Write this rank's figures to `folder`; runs on every rank."""
    figures = probe(device, config.disks, config.effort)
    (folder / f"{dist.get_rank()}.json").write_bytes(msgspec.json.encode(figures))


def key_of(ranks: int | None = None, disks: Sequence[str] = HERE) -> MeasurementKey:
    """Return the key of a measurement of this machine, with a number of ranks and the disks of directories."""
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
        disks=tuple(sorted(set(map(mount_point, disks)))),
    )


def _cpu_model() -> str:
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def combine(key: MeasurementKey, each: Sequence[RankFigures], *, disk_bytes: int) -> Measurement:
    """Combine the ranks' figures into those of the node: of own resources the slowest rank's, of shared ones sums."""
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
        fp8_flops=peak_flops_of(key.device, torch.float8_e4m3fn),
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
