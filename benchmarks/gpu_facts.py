"""What the machine of a GPU can do: versions, links, page-locking, memory, matrix products, launches."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch
from devices import Device
from gpu_1b import matmul_ceiling
from gpu_findings import Findings
from report import circumstances, plot_bars

from dzero.offload.memory_pool import HostMemoryPool

SMI = "name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.current,pcie.link.width.current"
MIB = 1 << 20


def facts(device: Device, found: Findings) -> None:
    """Measure all of it; each figure is kept as soon as it is there."""
    found.note(circumstances=circumstances(), smi=smi(device, found), gpu=gpu_facts(device, found))
    sizes = [MIB, 16 * MIB, 128 * MIB, 1024 * MIB] if device.on_gpu else [MIB]
    rates = links(device, sizes, found)
    largest = rates[f"{sizes[-1] // MIB} MiB"]
    found.note(pinning=pinning(device, sizes[-1], found))
    copied = memory_rate(device)
    found.note(device_bytes_per_s=copied)
    device.free()
    ceiling = matmul_ceiling(device)
    found.note(bf16_matmul_flops=ceiling, launch_s=launch_seconds(device))
    plot_bars("gpu_facts", f"{device.name}: copies, GB/s", rates)
    ways = ", ".join(f"{way} {rate:.1f}" for way, rate in largest.items())
    found.find(
        f"{device.name}, torch {torch.__version__}; copies of {sizes[-1] // MIB} MiB in GB/s: {ways}; memory "
        f"{copied / 1e12:.2f} TB/s, bf16 {ceiling / 1e12:.0f} TFLOP/s"
    )


def smi(device: Device, found: Findings) -> dict[str, str]:
    """Return what the driver's own tool says of the GPU; nothing where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not device.on_gpu:
        if not device.on_gpu:
            found.stand_in("no nvidia-smi is asked")
        return {}
    asked = subprocess.run([tool, f"--query-gpu={SMI}", "--format=csv,noheader"], capture_output=True, text=True)
    line = asked.stdout.splitlines()[0] if asked.stdout else asked.stderr.strip()
    return dict(zip(SMI.split(","), (word.strip() for word in line.split(",")), strict=False))


def gpu_facts(device: Device, found: Findings) -> dict[str, Any]:
    """Return what torch knows of the GPU, and the versions that decide."""
    versions: dict[str, Any] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    if not device.on_gpu:
        found.stand_in("the CPU has no properties, driver or nccl to tell")
        return versions
    properties = torch.cuda.get_device_properties(device.torch)
    wanted = ("name", "major", "minor", "multi_processor_count", "total_memory", "L2_cache_size")
    told = {name: getattr(properties, name, None) for name in wanted}
    free, total = torch.cuda.mem_get_info(device.torch)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    versions |= {"cuda": torch.version.cuda, "nccl": nccl, "cudnn": torch.backends.cudnn.version()}
    return {**told, **versions, "devices": torch.cuda.device_count(), "free_bytes": free, "total_bytes": total}


def links(device: Device, sizes: list[int], found: Findings) -> dict[str, dict[str, float]]:
    """Return GB/s by size and way, for pinned and pageable host memory."""
    if not device.on_gpu:
        found.stand_in("copies within host memory are timed as the link")
    rates: dict[str, dict[str, float]] = {}
    for size in sizes:
        there = torch.zeros(size, dtype=torch.uint8, device=device.torch)
        of_size = rates[f"{size // MIB} MiB"] = {}
        for kind in ("pinned", "pageable"):
            host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.on_gpu and kind == "pinned")
            ways: dict[str, Callable[[], object]] = {
                f"to device, {kind}": lambda host=host, there=there: there.copy_(host, non_blocking=True),
                f"to host, {kind}": lambda host=host, there=there: host.copy_(there, non_blocking=True),
            }
            for way, copy in ways.items():
                of_size[way] = size / device.median_seconds(copy, 5) / 1e9
        of_size["both ways, pinned"] = 2 * size / device.median_seconds(both_ways(device, size), 5) / 1e9
        found.note(link_gb_per_s=rates)
    return rates


def both_ways(device: Device, size: int) -> Callable[[], object]:
    """Return a copy to the device and one to the host at the same time, of pinned memory."""
    hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=device.on_gpu) for _ in range(2)]
    theirs = [torch.zeros(size, dtype=torch.uint8, device=device.torch) for _ in range(2)]
    if not device.on_gpu:
        return lambda: (theirs[0].copy_(hosts[0]), hosts[1].copy_(theirs[1]))
    streams = [torch.cuda.Stream(device.torch) for _ in range(2)]

    def copy() -> None:
        with torch.cuda.stream(streams[0]):
            theirs[0].copy_(hosts[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            hosts[1].copy_(theirs[1], non_blocking=True)

    return copy


def pinning(device: Device, size: int, found: Findings) -> dict[str, float]:
    """Return seconds until `size` bytes are page-locked, by torch and by the pool of the offload, and its rates."""
    start = time.perf_counter()
    by_torch = torch.empty(size, dtype=torch.uint8, pin_memory=device.on_gpu)
    torch_s = time.perf_counter() - start
    del by_torch
    pool, start = HostMemoryPool(size, pin=device.on_gpu), time.perf_counter()
    lease = pool.lease(size, "a fact")
    host = lease.view(torch.uint8, size)
    touch_s, start = time.perf_counter() - start, time.perf_counter()
    pool.settle()
    lock_s = time.perf_counter() - start
    if not device.on_gpu:
        found.stand_in("no memory is page-locked")
    there = torch.zeros(size, dtype=torch.uint8, device=device.torch)
    to_host = size / device.median_seconds(lambda: host.copy_(there, non_blocking=True), 5) / 1e9
    to_device = size / device.median_seconds(lambda: there.copy_(host, non_blocking=True), 5) / 1e9
    rates = {"arena_to_host_gb_per_s": to_host, "arena_to_device_gb_per_s": to_device}
    return {"bytes": size, "torch_s": torch_s, "arena_touch_s": touch_s, "arena_lock_s": lock_s, **rates}


def memory_rate(device: Device) -> float:
    """Return bytes/s, read and written, of a copy within the device's memory."""
    count = (2048 if device.on_gpu else 4) * MIB
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device.torch) for _ in range(2))
    return 2 * count / device.median_seconds(lambda: target.copy_(source), 10)


def launch_seconds(device: Device) -> float:
    """Return the host's seconds to enqueue one small kernel, of 1000 behind work that keeps the device busy."""
    small, kernels = torch.zeros(8, device=device.torch), 1000
    device.synchronize()
    device.keep_busy(50_000_000)
    start = time.perf_counter()
    for _ in range(kernels):
        small.add_(1)
    enqueued = time.perf_counter() - start
    device.synchronize()
    return enqueued / kernels
