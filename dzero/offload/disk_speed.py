"""Bandwidth of scratch paths, measured through the store, to choose weights, block size and threads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch

from dzero.hardware import format_bytes
from dzero.offload.disk import DiskStore
from dzero.offload.memory_pool import HostMemoryPool
from dzero.utils.scratch_paths import try_folder
from dzero.zero.offload_config import DiskConfig

SAMPLE_BYTES = 512 << 20
QUICK_BYTES = 8 << 20
QUICK_ROUNDS = 5
ROUNDS = 3
BLOCKS_BYTES = (4 << 20, 16 << 20, 64 << 20)
THREADS = (1, 4, 8)
ENOUGH = 0.97
"""Fraction of the best speed that smaller blocks and fewer threads must reach to be preferred."""


@dataclass(frozen=True)
class DiskSpeed:
    """Bandwidth of one path used alone, in bytes per second."""

    path: str
    write_bytes_per_s: float
    read_bytes_per_s: float

    @property
    def both_bytes_per_s(self) -> float:
        """Harmonic mean, for data that is written as often as it is read; the weight of the path."""
        return 2 / (1 / self.write_bytes_per_s + 1 / self.read_bytes_per_s)


def measure(config: DiskConfig, *, sample_bytes: int = SAMPLE_BYTES, rounds: int = ROUNDS) -> list[DiskSpeed]:
    """Measure each path of `config` alone.

    Args:
        config: Paths and transfer settings.
        sample_bytes: Size of one transfer.
        rounds: Number of measured writes and reads, of which medians are taken. One more write precedes them.

    Raises:
        DiskError: A path cannot be used or has too little space.
        ValueError: `sample_bytes` or `rounds` is below 1.
    """
    if rounds < 1 or sample_bytes < 1:
        raise ValueError(f"rounds={rounds}, sample_bytes={sample_bytes}: both must be at least 1")
    data = HostMemoryPool(sample_bytes).lease(sample_bytes, "sample").data
    data[: sample_bytes // 8 * 8].view(torch.int64).random_()  # random, because some devices compress data
    return [_speed(replace(config, paths=[path]), data, rounds) for path in config.paths]


def weighed(config: DiskConfig) -> DiskConfig:
    """Return `config` with weights; they are measured, in little memory, if several paths have none."""
    if config.weights is not None or len(config.paths) == 1:
        return config
    speeds = measure(config, sample_bytes=QUICK_BYTES, rounds=QUICK_ROUNDS)
    return replace(config, weights=[speed.both_bytes_per_s for speed in speeds])


def _speed(config: DiskConfig, data: torch.Tensor, rounds: int) -> DiskSpeed:
    seconds: dict[str, list[float]] = {"write": [], "read": []}
    with DiskStore(config, {"sample": data.numel()}) as store:
        store.write("sample", data).result()  # the first write also updates the file system's metadata
        for _ in range(rounds):
            for way, move in (("write", store.write), ("read", store.read)):
                start = time.perf_counter()
                move("sample", data).result()
                seconds[way].append(time.perf_counter() - start)
    write_s, read_s = median(seconds["write"]), median(seconds["read"])
    return DiskSpeed(config.paths[0], data.numel() / write_s, data.numel() / read_s)


def bench(paths: Sequence[str], *, sample_bytes: int = SAMPLE_BYTES, rounds: int = ROUNDS) -> Iterator[str]:
    """Yield a table of speeds by block size and threads, and then the settings to choose, line by line."""
    for path in paths:
        try_folder(path)
    wear = len(BLOCKS_BYTES) * len(THREADS) * (rounds + 1) * sample_bytes
    yield f"{format_bytes(sample_bytes)} at a time, {format_bytes(wear)} written to each path in all"
    width = max(map(len, paths))
    yield f"{'path':<{width}}  {'block':>9}  threads  write GB/s  read GB/s"
    found: list[tuple[DiskConfig, list[DiskSpeed]]] = []
    for block_bytes in BLOCKS_BYTES:
        for threads in THREADS:
            config = DiskConfig(paths=list(paths), block_bytes=block_bytes, threads=threads)
            found.append((config, measure(config, sample_bytes=sample_bytes, rounds=rounds)))
            for speed in found[-1][1]:
                gb_per_s = f"{speed.write_bytes_per_s / 1e9:>10.2f}  {speed.read_bytes_per_s / 1e9:>9.2f}"
                yield f"{speed.path:<{width}}  {format_bytes(block_bytes):>9}  {threads:>7}  {gb_per_s}"
    yield ""
    yield from chosen(found)


def chosen(found: Sequence[tuple[DiskConfig, Sequence[DiskSpeed]]]) -> list[str]:
    """Return lines on the first settings in `found` whose paths together reach nearly the best speed.

    Smaller blocks and fewer threads come first in `found`.
    """
    together = [sum(speed.both_bytes_per_s for speed in speeds) for _, speeds in found]
    config, speeds = next(row for row, total in zip(found, together, strict=True) if total >= ENOUGH * max(together))
    whole = sum(speed.both_bytes_per_s for speed in speeds)
    shares = ", ".join(f"{speed.path} {speed.both_bytes_per_s / whole:.2f}" for speed in speeds)
    weights = ",".join(f"{speed.both_bytes_per_s / 1e9:.2f}" for speed in speeds)
    several = f" 'offload.disk.weights=[{weights}]'" if len(speeds) > 1 else ""
    settings = f"offload.disk.block_bytes={config.block_bytes} offload.disk.threads={config.threads}{several}"
    return [f"shares by path: {shares}", f"settings: {settings}"]
