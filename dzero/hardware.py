"""Properties of this machine: accelerator peaks, memory and cores of this process, dtypes by name, and units.

property                  source
FLOP/s of an accelerator  the vendor's datasheet, by the exact device name; None if it is not listed
memory, cores             the minimum of the machine, the scheduler's affinity and every enclosing cgroup
memory of this process    /proc/self/status: VmRSS for the current value, VmHWM for the peak
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
FILE_DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Dtypes by their names in safetensors files."""

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
UNKNOWN_NODE = -1
"""Memory node (NUMA) that is unknown, as the kernel writes it too."""


@dataclass(frozen=True)
class Peak:
    """Dense peaks in TFLOP/s, without sparsity: 8- and 16-bit matmuls with fp32 sums, TF32, and plain fp32."""

    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    fp8: float | None = None


# Keys are patterns for the whole name, so that a slice (MIG), a laptop chip or a restricted model matches none.
# Datasheets quote sparse peaks for Ampere and later; the values here are half of them.
PEAKS: dict[str, Peak] = {
    r"Tesla V100-SXM2-\d+GB(-LS)?": Peak(None, 125.0, None, 15.7),  # NVIDIA V100 datasheet, 2020 (no bf16 units)
    r"Tesla V100-PCIE-\d+GB": Peak(None, 112.0, None, 14.0),  # NVIDIA V100 datasheet, 2020
    r"NVIDIA A100-(SXM4|PCIE)-(40|80)GB": Peak(312.0, 312.0, 156.0, 19.5),  # NVIDIA A100 datasheet, 2022
    r"NVIDIA A100 80GB PCIe": Peak(312.0, 312.0, 156.0, 19.5),  # NVIDIA A100 datasheet, 2022
    r"NVIDIA H100 80GB HBM3": Peak(989.4, 989.4, 494.7, 66.9, 1978.9),  # NVIDIA H100 (SXM5) architecture whitepaper
    r"NVIDIA H100 PCIe": Peak(756.5, 756.5, 378.0, 51.2, 1513.0),  # NVIDIA H100 (PCIe) datasheet: 1,513 sparse
    r"NVIDIA H200": Peak(989.4, 989.4, 494.7, 66.9, 1978.9),  # NVIDIA H200 (SXM) datasheet: the GPU of H100 SXM
    r"NVIDIA B200": Peak(
        2250.0, 2250.0, 1100.0, 75.0, 4500.0
    ),  # NVIDIA HGX B200 datasheet, per GPU: 4.5, 2.2, 9 PF sparse
    r"NVIDIA GeForce RTX 4090": Peak(165.2, 165.2, 82.6, 82.6, 330.3),  # NVIDIA Ada whitepaper, appendix A, fp32 sums
    r"NVIDIA GeForce RTX 5090": Peak(209.5, 209.5, 104.8, 104.8, 419.0),  # NVIDIA RTX Blackwell whitepaper, fp32 sums
    r"NVIDIA L4": Peak(121.0, 121.0, 60.0, 30.3, 242.5),  # NVIDIA L4 datasheet: 242, 120 and 485 sparse
    r"NVIDIA L40S": Peak(362.05, 362.05, 183.0, 91.6, 733.0),  # NVIDIA L40S datasheet
    r"AMD Instinct MI300X( OAM)?": Peak(1307.4, 1307.4, 653.7, 163.4, 2614.9),  # AMD Instinct MI300X datasheet
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Return the dense peak of `device` in FLOP/s for matmuls in `dtype`; None if unknown (CPUs, unlisted names).

    fp32 matmuls are compared with the TF32 peak if torch is set to use TF32 for them, else with plain fp32.
    """
    if device.type != "cuda":
        return None
    tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
    return peak_flops_of(torch.cuda.get_device_name(device), dtype, tf32=tf32)


def peak_flops_of(name: str, dtype: torch.dtype, *, tf32: bool = False) -> float | None:
    """Return the dense peak in FLOP/s of the accelerator that torch.cuda.get_device_name calls `name`, or None."""
    for pattern, peak in PEAKS.items():
        if re.fullmatch(pattern, name):
            tera = {
                torch.bfloat16: peak.bf16,
                torch.float16: peak.fp16,
                torch.float32: peak.tf32 if tf32 and peak.tf32 else peak.fp32,
                torch.float8_e4m3fn: peak.fp8,
            }.get(dtype)
            return None if tera is None else tera * 1e12
    return None


def multiplies_fp8(device_type: str) -> bool:
    """Return whether this machine's devices have units for 8-bit floats: NVIDIA's from Ada on, AMD's from MI300 on."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= ((8, 9) if torch.version.hip is None else (9, 4))


def slow_products(dtype: torch.dtype, device_type: str) -> str:
    """Return what to say if this CPU has no instructions for matrix products in `dtype`; empty if it has."""
    if device_type != "cpu" or dtype not in (torch.bfloat16, torch.float16):
        return ""
    if torch.backends.cpu.get_cpu_capability() != "AVX2":  # oneDNN multiplies 16 bits from AVX-512 on
        return ""
    how = f"torch multiplies {dtype_name(dtype)} up to 80 times slower than fp32"
    return f"this CPU has no AVX-512, so {how}: take precision=fp32"


def dtype_of(name: str, *, key: str = "dtype", allowed: Iterable[str] = tuple(DTYPES)) -> torch.dtype:
    """Return torch.bfloat16 for `bf16`, and so on; raise ValueError, which names the setting, if it is not allowed."""
    names = tuple(allowed)
    if name not in names:
        raise ValueError(f"{key}={name}: choose one of {', '.join(names)}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return `bf16` for torch.bfloat16, and so on; torch's own name for others (`int64`)."""
    return {known: name for name, known in DTYPES.items()}.get(dtype, str(dtype).removeprefix("torch."))


def device_memory_bytes(device: torch.device) -> int:
    """Return the total memory of a CUDA device; for any other device, that of the host."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory_bytes()


def host_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the memory that this process and others in its cgroup may use: RAM, or a lower cgroup limit."""
    limits = [_status_bytes(proc / "meminfo", "MemTotal") or 0]
    for folder in _cgroup_folders("memory", proc, cgroup):
        for name in ("memory.max", "memory.limit_in_bytes"):  # cgroup v2, v1
            limits += [int(word) for word in _words(folder / name) if word != "max"]
    return min(limits)


def host_available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the memory that can be filled now without swapping: the kernel's estimate, or less in a cgroup."""
    left = [_status_bytes(proc / "meminfo", "MemAvailable") or 0]
    for folder in _cgroup_folders("memory", proc, cgroup):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            words = _words(folder / limit) + _words(folder / used)
            if len(words) == 2 and words[0] != "max":
                left.append(max(0, int(words[0]) - int(words[1])))
    return min(left)


def available_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the cores of this process: its affinity, or less (rounded down, at least 1) if a cgroup has a quota."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders("cpu", proc, cgroup):
        v2 = _words(folder / "cpu.max")
        v1 = _words(folder / "cpu.cfs_quota_us") + _words(folder / "cpu.cfs_period_us")
        for quota in (v2, v1):
            if len(quota) == 2 and quota[0] not in ("max", "-1"):
                cores = min(cores, int(quota[0]) / int(quota[1]))
    return max(1, int(cores))


def cores_of_rank(local_rank: int, local_ranks: int, sys: Path = Path("/sys")) -> list[int]:
    """Return this rank's part of the process's cores: neighboring cores, one memory node (NUMA) after the other.

    All cores are returned if there are fewer cores than ranks.
    """
    allowed = os.sched_getaffinity(0)
    nodes = [_core_list(file.read_text()) for file in sorted(sys.glob("devices/system/node/node*/cpulist"))]
    ordered = [core for node in nodes for core in node if core in allowed]
    ordered += sorted(allowed - set(ordered))
    share = len(ordered) // local_ranks
    return ordered[local_rank * share : (local_rank + 1) * share] if share else ordered


def memory_node_of(cores: Iterable[int], sys: Path = Path("/sys")) -> int:
    """Return the memory node (NUMA) that all `cores` are on; -1 if there are none, or on several nodes, or unknown."""
    wanted = set(cores)
    for file in sys.glob("devices/system/node/node*/cpulist"):
        if wanted and wanted <= set(_core_list(file.read_text())):
            return int(file.parent.name.removeprefix("node"))
    return UNKNOWN_NODE


def _core_list(text: str) -> list[int]:
    """Parse the kernel's list of cores, e.g. `0-3,8`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return [core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)]


def rss_bytes() -> int:
    """Return the memory of this process that is in RAM now."""
    return _status_bytes(PROC / "self/status", "VmRSS") or 0


def peak_rss_bytes() -> int:
    """Return the peak memory of this process in RAM since it started, or since `reset_peak_rss`."""
    peak = _status_bytes(PROC / "self/status", "VmHWM")
    return peak if peak is not None else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def give_back_freed_memory() -> None:
    """Return freed memory to the system, if libc keeps it for reuse (as glibc does, even below memory in use)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def reset_peak_rss() -> bool:
    """Reset the peak to the memory in RAM now; return False, without effect, if the kernel refuses."""
    try:
        (PROC / "self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def format_bytes(count: float) -> str:
    """Format as `1.50 GiB`; powers of 1024, three digits."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_count(count: float) -> str:
    """Format as `124 M`; powers of 1000 (k, M, G, T), three digits."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P"))


def format_seconds(seconds: float) -> str:
    """Format as `4.20 ms`, `12.3 s`, `4:05` (minutes), or `1:02:03` (hours)."""
    if round(seconds) < 60:
        scale, unit = next(((s, u) for s, u in ((1.0, "s"), (1e3, "ms")) if seconds * s >= 1), (1e6, "µs"))
        return f"{_three_digits(seconds * scale)} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while round(abs(value)) >= base and power < len(units) - 1:
        value, power = value / base, power + 1
    digits = f"{value:.0f}" if power == 0 else _three_digits(value)
    return f"{digits} {units[power]}".rstrip()


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{decimals}f}"


def _cgroup_folders(controller: str, proc: Path, mount: Path) -> Iterator[Path]:
    """Yield this process's cgroup for `controller` and its ancestors, any of which may limit it; v1 and v2."""
    for line in (proc / "self/cgroup").read_text().splitlines() if (proc / "self/cgroup").exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = mount / controller if controllers else mount
        inner = Path(path.lstrip("/"))
        yield from (root / folder for folder in (inner, *inner.parents))


def _words(path: Path) -> list[str]:
    """Return the words of a small kernel file; none if it does not exist."""
    return path.read_text().split() if path.exists() else []


def _status_bytes(path: Path, field: str) -> int | None:
    """Return the value of a `field:  123 kB` line of a /proc file in bytes; None if it cannot be read."""
    try:
        with path.open("rb", buffering=0) as file:
            text = file.read()
    except OSError:
        return None
    found = re.search(rb"^%b:\s+(\d+) kB$" % field.encode(), text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
