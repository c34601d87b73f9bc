"""Peaks by name, cgroup limits, formatting."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dzero.hardware import (
    available_cores,
    cores_of_rank,
    device_memory_bytes,
    dtype_name,
    dtype_of,
    format_bytes,
    format_count,
    format_seconds,
    host_available_bytes,
    host_memory_bytes,
    peak_flops,
    peak_flops_of,
    peak_rss_bytes,
    reset_peak_rss,
    rss_bytes,
    slow_products,
)

GIB = 2**30


def test_peaks_are_dense_and_by_exact_name() -> None:
    bf16, fp32 = torch.bfloat16, torch.float32
    assert peak_flops_of("NVIDIA H100 80GB HBM3", bf16) == pytest.approx(989.4e12)
    assert peak_flops_of("NVIDIA H100 PCIe", bf16) == pytest.approx(756.5e12)
    assert peak_flops_of("NVIDIA H100 80GB HBM3", torch.float8_e4m3fn) == pytest.approx(1978.9e12)
    assert peak_flops_of("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn) is None
    assert peak_flops_of("NVIDIA A100-SXM4-80GB", fp32, tf32=True) == pytest.approx(156e12)
    assert peak_flops_of("NVIDIA A100-SXM4-80GB", fp32) == pytest.approx(19.5e12)
    assert peak_flops_of("Tesla V100-SXM2-32GB", fp32, tf32=True) == pytest.approx(15.7e12)  # it has no TF32


@pytest.mark.parametrize(
    "name",
    ["NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H20", "NVIDIA L40", "abacus"],
)
def test_an_unlisted_device_has_no_peak(name: str) -> None:
    assert peak_flops_of(name, torch.bfloat16) is None


def test_a_dtype_without_units_has_no_peak() -> None:
    assert peak_flops_of("Tesla V100-SXM2-16GB", torch.bfloat16) is None
    assert peak_flops_of("NVIDIA H200", torch.int64) is None
    assert peak_flops(torch.device("cpu"), torch.bfloat16) is None


@pytest.mark.gpu
def test_a_listed_gpu_has_a_peak_for_the_precision_in_use() -> None:
    device = torch.device("cuda", 0)
    peak = peak_flops(device, torch.bfloat16)
    assert peak == peak_flops_of(torch.cuda.get_device_name(device), torch.bfloat16)
    assert device_memory_bytes(device) > GIB


def test_dtype_names_read_back() -> None:
    for name in ("fp64", "fp32", "bf16", "fp16", "int8", "uint8"):
        assert dtype_name(dtype_of(name)) == name
    assert dtype_name(torch.int64) == "int64"


def test_an_unknown_dtype_names_the_key_and_the_allowed_set() -> None:
    with pytest.raises(ValueError, match=r"precision.param=bf17: choose one of fp32, bf16"):
        dtype_of("bf17", key="precision.param", allowed=("fp32", "bf16"))
    with pytest.raises(ValueError, match="int8"):
        dtype_of("int8", allowed=("fp32",))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.50 KiB"),
        (1.5 * GIB, "1.50 GiB"),
        (1023.9 * 2**20, "1.00 GiB"),
        (80 * GIB, "80.0 GiB"),
        (141 * GIB, "141 GiB"),
        (9.999 * GIB, "10.0 GiB"),
        (5000 * 2**50, "5000 PiB"),
    ],
)
def test_bytes_are_formatted_with_three_digits(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(7, "7"), (999.7, "1.00 k"), (124_439_808, "124 M"), (8.03e9, "8.03 G"), (70.6e9, "70.6 G")]
)
def test_counts_are_formatted_with_three_digits(count: float, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0000025, "2.50 µs"), (0.0042, "4.20 ms"), (12.34, "12.3 s"), (59.7, "1:00"), (245, "4:05"), (3723, "1:02:03")],
)
def test_seconds_are_formatted_by_size(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def machine(root: Path, cgroup: str, files: dict[str, str]) -> tuple[Path, Path]:
    """A /proc and a /sys/fs/cgroup of a machine with 16 GiB, as files under `root`."""
    proc, mount = root / "proc", root / "cgroup"
    for path, text in {
        proc / "meminfo": f"MemTotal:       {16 * 2**20} kB\nMemFree: 1 kB\n",
        proc / "self/cgroup": cgroup,
        **{mount / name: text for name, text in files.items()},
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return proc, mount


def test_host_memory_is_the_tightest_enclosing_limit(tmp_path: Path) -> None:
    v2 = {"a/b/memory.max": "max\n", "a/memory.max": f"{3 * GIB}\n", "memory.max": f"{8 * GIB}\n"}
    assert host_memory_bytes(*machine(tmp_path / "v2", "0::/a/b\n", v2)) == 3 * GIB
    v1 = {"memory/a/memory.limit_in_bytes": f"{5 * GIB}\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert host_memory_bytes(*machine(tmp_path / "v1", "4:memory:/a\n2:cpu:/z\n0::/\n", v1)) == 5 * GIB
    assert host_memory_bytes(*machine(tmp_path / "free", "0::/\n", {})) == 16 * GIB


def test_cores_are_bounded_by_affinity_and_quota(tmp_path: Path) -> None:
    affinity = len(os.sched_getaffinity(0))
    one = machine(tmp_path / "v2", "0::/a\n", {"a/cpu.max": "150000 100000\n"})
    assert available_cores(*one) == 1
    half = machine(tmp_path / "half", "0::/\n", {"cpu.max": "50000 100000\n"})
    assert available_cores(*half) == 1
    v1 = {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert available_cores(*machine(tmp_path / "v1", "1:cpu,cpuacct:/\n", v1)) == 1
    free = machine(
        tmp_path / "free", "1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}
    )
    assert available_cores(*free) == affinity


def test_cores_are_shared_among_the_ranks_of_a_host_node_by_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for node, cores in enumerate(["0-1,4-5", "2-3,6-7"]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [cores_of_rank(rank, 2, tmp_path) for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [cores_of_rank(rank, 3, tmp_path) for rank in range(3)] == [[0, 1], [4, 5], [2, 3]]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 9})
    assert cores_of_rank(0, 1, tmp_path) == [5, 3, 9]
    assert cores_of_rank(3, 4, tmp_path) == [5, 3, 9]  # fewer cores than ranks


def test_what_is_available_is_the_least_that_any_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   50 kB\n")
    (tmp_path / "self/cgroup").write_text("0::/job\n")
    job = tmp_path / "cgroup/job"
    job.mkdir(parents=True)
    assert host_available_bytes(tmp_path, tmp_path / "cgroup") == 50 * 1024
    (job / "memory.max").write_text("30000\n")
    (job / "memory.current").write_text("10000\n")
    assert host_available_bytes(tmp_path, tmp_path / "cgroup") == 20_000
    (job / "memory.max").write_text("max\n")
    assert host_available_bytes(tmp_path, tmp_path / "cgroup") == 50 * 1024


def test_this_machine_answers() -> None:
    assert device_memory_bytes(torch.device("cpu")) == host_memory_bytes() > 2**28
    assert 1 <= available_cores() <= len(os.sched_getaffinity(0))


def test_a_cpu_without_16_bit_products_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, dtype, device_type, is_slow in (
        ("AVX2", torch.bfloat16, "cpu", True),
        ("AVX2", torch.float16, "cpu", True),
        ("AVX2", torch.float32, "cpu", False),
        ("AVX512", torch.bfloat16, "cpu", False),
        ("AVX2", torch.bfloat16, "cuda", False),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert ("precision=fp32" in slow_products(dtype, device_type)) == is_slow


def test_the_high_water_mark_keeps_what_was_freed_until_it_is_reset() -> None:
    before = rss_bytes()
    block = torch.ones(2**25)  # 128 MiB
    del block
    assert peak_rss_bytes() >= before + 2**27 * 0.9
    if reset_peak_rss():
        assert peak_rss_bytes() < before + 2**26
