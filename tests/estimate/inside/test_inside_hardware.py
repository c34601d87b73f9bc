"""What dzero knows of a machine: its memory, cores and peaks, and figures that are measured, kept and shown.

These look inside, because a test cannot choose the machine: limits of cgroups, GPUs that are not here, damaged caches.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from from_words import run_of
from in_process import dzero as command
from omegaconf import OmegaConf

from dzero import DiskError, RunError, hardware
from dzero.estimate import measure_hardware, measurement_cache
from dzero.estimate.decoder_probe import ExchangeRates, OperatorRates
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.measure_hardware import ProbeConfig, cached, combine, key_of, measured
from dzero.estimate.measurement_cache import DamagedCache, Measurement
from dzero.estimate.probes import Effort, RankFigures
from dzero.plan.hardware_tables import age, as_yaml
from dzero.plan.plan_run import hardware_of
from dzero.utils.scratch_paths import mount_point

GIB = 2**30

KEY = replace(key_of(2), cpu="abacus", cores=2, device_type="cpu", device="")
FIGURES: dict[str, Any] = {"device_bytes": 8 << 30, "bf16_flops": 1.5e11, "efficiency": 1.0, "network": None}
HARDWARE = replace(run_of("hardware=laptop").hardware, name="abacus", **FIGURES)
MEASUREMENT = Measurement(key=KEY, when=datetime(2026, 1, 1, tzinfo=UTC), hardware=HARDWARE)
SMALL = Effort(
    seconds=0.02, matrix=128, copy_bytes=1 << 20, tokens=256, update_elems=1 << 16, disk_bytes=1 << 20, rounds=2
)
RANK = RankFigures(
    bf16_flops=4e11,
    fp16_flops=5e11,
    fp32_flops=1e10,
    operators=OperatorRates(attention=2e11, operator_s=3e-6, bandwidth=2e12),
    link=1e10,
    link_alone=1.6e10,
    exchange=ExchangeRates(link=3e9, latency_s=1e-4),
    update_bandwidth=2.8e9,
    update_elems_per_s=1.3e8,
    disk_read=3e9,
    disk_write=2e9,
    device_bytes=8 << 30,
    reserved_bytes=1 << 30,
)


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """A measurement of two ranks of this machine, which has no GPUs, in a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = replace(MEASUREMENT, key=key_of(2), when=datetime.now(UTC))
    measurement_cache.store(found)
    return found


@pytest.mark.full("tests/estimate/inside/test_inside_hardware.py::test_figures_of_one_disk_are_not_shown_for_another")
@pytest.mark.usefixtures("known")
def test_every_figure_of_this_machine_is_measured() -> None:
    found = measured(2, effort=SMALL)
    figures = {figure: getattr(found.hardware, figure) for figure in HardwareConfig.__dataclass_fields__}
    assert {figure for figure, each in figures.items() if each is None} == {
        "network",  # one machine
        "fp8_flops",  # whose device has no products in 8 bits
    }
    assert (found.hardware.device_type, found.hardware.devices_per_node, found.hardware.efficiency) == ("cpu", 2, 1.0)
    assert found.hardware.host_bytes == hardware.host_memory_bytes()
    assert found.hardware.device_bytes == hardware.host_memory_bytes() // 2
    assert cached(2) == found


def test_a_known_machine_is_not_measured_again(known: Measurement, capsys: pytest.CaptureFixture[str]) -> None:
    assert (known.key.ranks, known.key.torch) == (2, torch.__version__)
    assert cached(2) == known
    assert hardware_of(run_of("launch.workers=2")) == known.hardware
    assert cached(3) is None
    path = measurement_cache.folder() / known.key.file
    path.write_text("{")
    assert cached(2) is None
    assert f"{path}: damaged" in capsys.readouterr().err


def test_the_command_shows_age_figures_and_a_file(known: Measurement) -> None:
    """The file composes as a node of conf/hardware."""
    told = command("hardware", "--ranks", "2")
    assert "UTC, just now" in told.stdout
    assert "measuring" not in told.stderr
    file = as_yaml(known)
    assert file in told.stdout
    assert HardwareConfig(**OmegaConf.to_container(OmegaConf.create(file))) == HARDWARE  # type: ignore[arg-type]
    table = " ".join(told.stdout.partition(file)[0].split())
    assert all(figure in table for figure in HardwareConfig.__dataclass_fields__.keys() - {"name", "device_type"})
    for shown in ("device_bytes 8.00 GiB", "bf16_flops 150 GFLOP/s", "network unknown"):
        assert shown in table


def test_figures_of_one_disk_are_not_shown_for_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two disks of different speeds: each has figures of its own, which its folders share."""
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    for folder in (fast / "a", fast / "b", slow):
        folder.mkdir(parents=True)
    reads = {str(fast): 4e9, str(slow): 1e9}
    measuring: list[list[str]] = []

    def probe(_: object, config: ProbeConfig, folder: Path, *, workers: int) -> None:
        measuring.append([mount_point(disk) for disk in config.disks])
        figures = replace(RANK, disk_read=sum(reads[disk] for disk in measuring[-1]))
        for rank in range(workers):
            (folder / f"{rank}.json").write_bytes(msgspec.json.encode(figures))

    def told(*disks: Path, more: Sequence[str] = ()) -> str:
        found = command("hardware", "--ranks", "2", *more, "--disk", *disks)
        (row,) = (line for line in found.stdout.splitlines() if line.startswith("disk_read:"))
        return row

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os.path, "ismount", lambda path: path in (*reads, "/"))
    monkeypatch.setattr(measure_hardware, "start", probe)
    assert told(fast / "a") == "disk_read: 4.00e9"
    assert told(slow) == "disk_read: 1.00e9"
    assert told(fast / "b") == "disk_read: 4.00e9"
    assert measuring == [[str(fast)], [str(slow)]]
    assert told(slow, more=["--measure"]) == "disk_read: 1.00e9"
    assert measuring.pop() == [str(slow)]  # again, because it was asked for
    assert told(slow, fast / "a", fast / "b") == "disk_read: 5.00e9"  # together, each disk once
    assert sorted(measuring.pop()) == sorted(reads)
    assert told(fast, slow) == "disk_read: 5.00e9"
    monkeypatch.setattr(measure_hardware, "start", None)
    for paths, rate in (([str(slow / "made by the run")], 1e9), ([str(fast), str(slow)], 5e9)):
        words = ["launch.workers=2", "offload=disk", f"offload.disk.paths=[{','.join(paths)}]"]
        assert hardware_of(run_of(*words)).disk_read == rate


def test_torchruns_ranks_do_not_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match=r"of /.*, is not measured.* hardware --disk '/a b' \.\."):
        measured(2, ["/a b", ".."])


def test_ranks_make_a_node() -> None:
    """What each has: the slowest. What they share: the sum. What the first measures alone: as it is."""
    slow = replace(RANK, bf16_flops=3e11, link=5e9, link_alone=None)
    slow = replace(slow, operators=OperatorRates(1e11, 4e-6, 1e12), exchange=ExchangeRates(1e9, 3e-4))
    node = combine(KEY, [RANK, replace(slow, disk_read=None, disk_write=None)], disk_bytes=9)
    made = node.hardware
    assert (made.bf16_flops, made.device_bandwidth, made.collective_latency_s) == (3e11, 1e12, 3e-4)
    assert (made.attention_flops, made.operator_s) == (1e11, 4e-6)
    assert (made.host_link, made.host_bandwidth) == (1.6e10, 1.5e10)
    assert (made.host_memory_bandwidth, made.update_elems_per_s) == (5.6e9, 2.6e8)
    assert (made.disk_read, made.disk_bytes) == (3e9, 9)
    assert made.node_link == 1e9
    alone = combine(replace(KEY, ranks=1), [replace(RANK, exchange=ExchangeRates(None, 0.0))], disk_bytes=9)
    assert (alone.hardware.node_link, alone.hardware.host_bandwidth) == (None, None)
    assert alone.hardware.name == "abacus, 2 cores, 1 rank"


def test_a_listed_gpu_keeps_its_peak_and_tells_how_much_of_it_was_reached() -> None:
    name = "NVIDIA H100 80GB HBM3"
    peak = hardware.peak_flops_of(name, torch.bfloat16)
    assert peak is not None
    node = combine(replace(KEY, device_type="cuda", device=name), [RANK], disk_bytes=9)
    assert node.hardware.bf16_flops == peak
    assert node.hardware.efficiency == pytest.approx(4e11 / peak)
    volta = combine(replace(KEY, device_type="cuda", device="Tesla V100-SXM2-32GB"), [RANK], disk_bytes=9)
    assert volta.hardware.bf16_flops is None  # no bf16 units: fp16 tells how much is reached
    assert volta.hardware.efficiency == pytest.approx(5e11 / 125e12)


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)
    found = measured(1, [str(tmp_path)]).hardware
    assert found.device_type == "cuda"
    assert 0 < found.reserved_bytes < found.device_bytes
    assert found.host_link is not None
    assert found.host_link > 1e9


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the measurement of KEY goes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/dzero" / KEY.file


def test_what_is_stored_is_read_back_and_private(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measurement_cache.load(KEY) is None
    before = os.umask(0)
    try:
        assert measurement_cache.store(MEASUREMENT) == place
    finally:
        os.umask(before)
    assert measurement_cache.load(KEY) == MEASUREMENT
    for other in (replace(KEY, ranks=4), replace(KEY, torch="1.0"), replace(KEY, cpu="slide rule")):
        assert measurement_cache.load(other) is None
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (place, place.parent)]
    assert modes == [0o600, 0o700]
    assert [file.name for file in place.parent.iterdir()] == [KEY.file]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert measurement_cache.folder() == Path("/home/somebody/.cache/dzero")


def test_a_write_that_fails_leaves_the_old_one(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement_cache.store(MEASUREMENT)

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        measurement_cache.store(replace(MEASUREMENT, hardware=replace(HARDWARE, node_link=1.0)))
    assert measurement_cache.load(KEY) == MEASUREMENT
    assert [file.name for file in place.parent.iterdir()] == [KEY.file]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (b"{", b"", "damaged"),
        (b'"abacus"', b"3", "damaged"),
        (b'"efficiency": 1.0', b'"efficiency": 7.0', r"damaged, hardware.efficiency=7.0: a part of the peak"),
        (b'"ranks": 2', b'"ranks": 3', "of another machine than its name says"),
        (b"00Z", b"00", "of another machine"),
    ],
)
def test_what_is_damaged_is_told_and_replaced(place: Path, old: bytes, new: bytes, told: str) -> None:
    measurement_cache.store(MEASUREMENT)
    text = place.read_bytes()
    assert old in text
    place.write_bytes(text.replace(old, new))
    with pytest.raises(DamagedCache, match=told):
        measurement_cache.load(KEY)
    measurement_cache.store(MEASUREMENT)
    assert measurement_cache.load(KEY) == MEASUREMENT


def test_only_a_small_regular_file_is_read_and_no_link_followed(place: Path, tmp_path: Path) -> None:
    measurement_cache.store(MEASUREMENT)
    other = place.rename(tmp_path / "other.json")
    before = other.read_bytes()
    place.symlink_to(other)
    with pytest.raises(DamagedCache, match="a symbolic link, which is not followed"):
        measurement_cache.load(KEY)
    measurement_cache.store(replace(MEASUREMENT, hardware=replace(HARDWARE, node_link=1.0)))
    assert other.read_bytes() == before
    assert not place.is_symlink()
    place.write_bytes(b" " * (measurement_cache.MOST_BYTES + 1))
    with pytest.raises(DamagedCache, match="not a small file"):
        measurement_cache.load(KEY)
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(DamagedCache, match="not a small file of this user"):
        measurement_cache.load(KEY)
    place.parent.rename(tmp_path / "elsewhere")
    place.parent.symlink_to(tmp_path / "elsewhere")
    for use in (lambda: measurement_cache.load(KEY), lambda: measurement_cache.store(MEASUREMENT)):
        with pytest.raises(DiskError, match="a symbolic link is not followed"):
            use()


BF16, FP32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
PEAKS = [  # of dense products, by exact name; in TFLOP/s
    ("NVIDIA H100 80GB HBM3", BF16, False, 989.4),
    ("NVIDIA H100 PCIe", BF16, False, 756.5),
    ("NVIDIA H100 80GB HBM3", FP8, False, 1978.9),
    ("NVIDIA A100-SXM4-80GB", FP8, False, None),
    ("NVIDIA A100-SXM4-80GB", FP32, True, 156),
    ("NVIDIA A100-SXM4-80GB", FP32, False, 19.5),
    ("Tesla V100-SXM2-32GB", FP32, True, 15.7),  # it has no TF32
    ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", BF16, False, None),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", BF16, False, None),
    ("NVIDIA H20", BF16, False, None),
    ("Tesla V100-SXM2-16GB", BF16, False, None),
    ("NVIDIA H200", torch.int64, False, None),
]


def test_a_device_has_the_peaks_that_are_listed_for_its_exact_name() -> None:
    for name, dtype, tf32, peak in PEAKS:
        found = hardware.peak_flops_of(name, dtype, tf32=tf32)
        assert found == (peak and pytest.approx(peak * 1e12)), (name, dtype)


CARDS = {
    "v100_32g": "Tesla V100-SXM2-32GB",
    "dgx2_v100": "Tesla V100-SXM2-32GB",
    "a100_40g": "NVIDIA A100-SXM4-40GB",
    "a100_80g": "NVIDIA A100-SXM4-80GB",
    "h100_80g": "NVIDIA H100 80GB HBM3",
    "h200_141g": "NVIDIA H200",
    "b200": "NVIDIA B200",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "rtx5090": "NVIDIA GeForce RTX 5090",
}


def test_the_peaks_of_a_node_are_those_that_training_is_measured_against() -> None:
    for name, card in CARDS.items():
        node = run_of(f"hardware={name}").hardware
        for dtype, peak in ((BF16, node.bf16_flops), (torch.float16, node.fp16_flops), (FP32, node.fp32_flops)):
            assert hardware.peak_flops_of(card, dtype) == (peak and pytest.approx(peak)), (name, dtype)
        assert hardware.peak_flops_of(card, FP8) == (node.fp8_flops and pytest.approx(node.fp8_flops)), name


def test_numbers_are_shown_with_three_digits() -> None:
    of_bytes = {0: "0 B", 1536: "1.50 KiB", 1023.9 * 2**20: "1.00 GiB", 9.999 * GIB: "10.0 GiB", 2**63: "8192 PiB"}
    assert [hardware.format_bytes(count) for count in of_bytes] == [*of_bytes.values()]
    counts = {7: "7", 999.7: "1.00 k", 8.03e9: "8.03 G"}
    assert [hardware.format_count(count) for count in counts] == [*counts.values()]
    seconds = {0.0000025: "2.50 µs", 59.7: "1:00", 3723: "1:02:03"}
    assert [hardware.format_seconds(each) for each in seconds] == [*seconds.values()]
    assert [age(3), age(90_000), age(260_000)] == ["just now", "25:00:00 ago", "3 days ago"]


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
    assert hardware.host_memory_bytes(*machine(tmp_path / "v2", "0::/a/b\n", v2)) == 3 * GIB
    v1 = {"memory/a/memory.limit_in_bytes": f"{5 * GIB}\n", "memory/memory.limit_in_bytes": "9223372036854771712\n"}
    assert hardware.host_memory_bytes(*machine(tmp_path / "v1", "4:memory:/a\n2:cpu:/z\n0::/\n", v1)) == 5 * GIB
    assert hardware.host_memory_bytes(*machine(tmp_path / "free", "0::/\n", {})) == 16 * GIB


def test_cores_are_bounded_by_affinity_and_quota(tmp_path: Path) -> None:
    v1 = {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}
    unlimited = v1 | {"cpu/cpu.cfs_quota_us": "-1\n"}
    assert hardware.available_cores(*machine(tmp_path / "v2", "0::/a\n", {"a/cpu.max": "150000 100000\n"})) == 1
    assert hardware.available_cores(*machine(tmp_path / "half", "0::/\n", {"cpu.max": "50000 100000\n"})) == 1
    assert hardware.available_cores(*machine(tmp_path / "v1", "1:cpu,cpuacct:/\n", v1)) == 1
    affinity = len(os.sched_getaffinity(0))
    assert hardware.available_cores(*machine(tmp_path / "free", "1:cpu:/\n", unlimited)) == affinity


def test_ranks_of_a_host_share_its_cores_node_by_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cores in enumerate(["0-1,4-5", "2-3,6-7"]):
        folder = tmp_path / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(cores + "\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert [hardware.cores_of_rank(rank, 2, tmp_path) for rank in range(2)] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert [hardware.cores_of_rank(rank, 3, tmp_path) for rank in range(3)] == [[0, 1], [4, 5], [2, 3]]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {3, 5, 9})
    assert hardware.cores_of_rank(0, 1, tmp_path) == [5, 3, 9]
    assert hardware.cores_of_rank(3, 4, tmp_path) == [5, 3, 9]  # fewer cores than ranks


def test_what_is_available_is_the_least_that_any_limit_leaves(tmp_path: Path) -> None:
    proc, mount = machine(tmp_path, "0::/job\n", {"job/memory.current": "10000\n"})
    (proc / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   50 kB\n")
    for limit, left in (("30000", 20_000), ("max", 50 * 1024)):
        (mount / "job/memory.max").write_text(f"{limit}\n")
        assert hardware.host_available_bytes(proc, mount) == left


def test_a_cpu_without_16_bit_products_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, dtype, device_type, is_slow in (
        ("AVX2", torch.bfloat16, "cpu", True),
        ("AVX2", torch.float16, "cpu", True),
        ("AVX2", torch.float32, "cpu", False),
        ("AVX512", torch.bfloat16, "cpu", False),
        ("AVX2", torch.bfloat16, "cuda", False),
    ):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda found=capability: found)
        assert ("precision=fp32" in hardware.slow_products(dtype, device_type)) == is_slow


def test_the_high_water_mark_keeps_what_was_freed_until_it_is_reset() -> None:
    before = hardware.rss_bytes()
    block = torch.ones(2**25)  # 128 MiB
    del block
    assert hardware.peak_rss_bytes() >= before + 2**27 * 0.9
    if hardware.reset_peak_rss():
        assert hardware.peak_rss_bytes() < before + 2**26
