"""This machine, measured for real at a small size: every figure is there, is kept, and composes as a file of conf."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from measurements import HARDWARE, KEY, MEASUREMENT
from omegaconf import OmegaConf

from dzero import DiskError, RunError
from dzero import __main__ as command
from dzero.cli import machine
from dzero.config import CONF
from dzero.estimate import measure_hardware, measurement_cache
from dzero.estimate.decoder_probe import ExchangeRates, OperatorRates
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.estimate.measure_hardware import ProbeConfig, cached, combine, key_of, measured
from dzero.estimate.measurement_cache import Measurement
from dzero.estimate.probes import Effort, RankFigures, link_rate, matmul_flops, update_rate
from dzero.hardware import host_memory_bytes, peak_flops_of
from dzero.overrides import composed
from dzero.plan.hardware_tables import age, as_yaml, machine_table, text
from dzero.plan.plan_run import hardware_of, scratch_folders
from dzero.utils.scratch_paths import mount_point

SMALL = Effort(
    seconds=0.02,
    matrix=128,
    copy_bytes=1 << 20,
    tokens=256,
    update_elems=1 << 16,
    disk_bytes=1 << 20,
    rounds=2,
)
CPU = torch.device("cpu")
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


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Measurement]:
    """Two ranks on this machine; its cache is the module's own."""
    folder = tmp_path_factory.mktemp("measured")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.delenv("RANK", raising=False)
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield measured(2, effort=SMALL)


@pytest.mark.full
def test_every_figure_of_this_machine_is_measured(here: Measurement) -> None:
    hardware = here.hardware
    unknown = {figure for figure in HardwareConfig.__dataclass_fields__ if getattr(hardware, figure) is None}
    assert unknown == {"network", "fp8_flops"}  # one machine, whose device has no products in 8 bits
    assert (hardware.device_type, hardware.devices_per_node, hardware.efficiency) == ("cpu", 2, 1.0)
    assert hardware.host_bytes == host_memory_bytes()
    assert hardware.device_bytes == host_memory_bytes() // 2
    assert here.age_s < 600


def test_it_is_measured_once(here: Measurement) -> None:
    assert cached(2) == here
    assert hardware_of(composed(["launch.workers=2"], CONF)) == here.hardware
    assert cached(3) is None


@pytest.mark.usefixtures("here")
def test_damage_is_told_and_counts_as_none(here: Measurement, capsys: pytest.CaptureFixture[str]) -> None:
    path = measurement_cache.folder() / here.key.file
    path.write_text("{")
    assert cached(2) is None
    assert f"{path}: damaged" in capsys.readouterr().err
    measurement_cache.store(here)


def test_the_command_shows_age_figures_and_a_file(
    here: Measurement, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dzero", "hardware", "--ranks", "2"])
    command.main()
    told = capsys.readouterr()
    assert "UTC, just now" in told.out
    assert as_yaml(here) in told.out
    assert "measuring" not in told.err


def test_the_command_measures_what_it_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []

    def measure(ranks: int | None, disks: list[str]) -> Measurement:
        asked.append((ranks, disks))
        return MEASUREMENT

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "measured", measure)
    for arguments in (["--ranks", "2"], ["--ranks", "2", "--measure", "--disk", str(tmp_path)]):
        monkeypatch.setattr(sys, "argv", ["dzero", "hardware", *arguments])
        command.main()
    assert asked == [(2, ["."]), (2, [str(tmp_path)])]
    assert "measuring" in capsys.readouterr().err


def test_figures_of_one_disk_are_not_shown_for_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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

    def told(*disks: Path) -> str:
        words = ["dzero", "hardware", "--ranks", "2", "--disk", *map(str, disks)]
        monkeypatch.setattr(sys, "argv", words)
        command.main()
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("disk_read:"))
        return row

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os.path, "ismount", lambda path: path in (*reads, "/"))
    monkeypatch.setattr(measure_hardware, "start", probe)
    assert told(fast / "a") == "disk_read: 4.00e9"
    assert told(slow) == "disk_read: 1.00e9"
    assert told(fast / "b") == "disk_read: 4.00e9"
    assert measuring == [[str(fast)], [str(slow)]]
    assert told(slow, fast / "a", fast / "b") == "disk_read: 5.00e9"  # together, each disk once
    assert sorted(measuring.pop()) == sorted(reads)
    assert told(fast, slow) == "disk_read: 5.00e9"
    monkeypatch.setattr(measure_hardware, "start", None)
    for paths, rate in (([str(slow / "made by the run")], 1e9), ([str(fast), str(slow)], 5e9)):
        words = ["launch.workers=2", "offload=disk", f"offload.disk.paths=[{','.join(paths)}]"]
        assert hardware_of(composed(words, CONF)).disk_read == rate


def test_a_scratch_path_that_the_run_will_make_is_measured_where_it_will_be(tmp_path: Path) -> None:
    paths = [tmp_path, tmp_path / "made", tmp_path / "missing" / "made"]
    config = composed(["offload=disk", f"offload.disk.paths=[{','.join(map(str, paths))}]"], CONF)
    assert scratch_folders(config) == [str(tmp_path), str(tmp_path), str(tmp_path / "missing")]
    with pytest.raises(DiskError, match="must be a directory that exists"):
        hardware_of(replace(config, launch=replace(config.launch, workers=7)))


def test_torchruns_ranks_do_not_measure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RunError, match=r"without torchrun, python -m dzero hardware$"):
        measured(2)
    with pytest.raises(RunError, match=r"of /.*, is not measured.* hardware --disk '/a b' \.\."):
        measured(2, ["/a b", ".."])


def test_the_key_is_this_machine() -> None:
    key = key_of(3)
    assert key.ranks == 3
    assert key.torch == torch.__version__
    assert key.host_bytes == host_memory_bytes()
    assert key.cpu


def test_ranks_make_a_node() -> None:
    """What each has: the slowest. What they share: the sum. What the first measures alone: as it is."""
    slow = replace(RANK, bf16_flops=3e11, link=5e9, link_alone=None)
    slow = replace(slow, operators=OperatorRates(1e11, 4e-6, 1e12), exchange=ExchangeRates(1e9, 3e-4))
    node = combine(KEY, [RANK, replace(slow, disk_read=None, disk_write=None)], disk_bytes=9)
    hardware = node.hardware
    assert (hardware.bf16_flops, hardware.device_bandwidth, hardware.collective_latency_s) == (3e11, 1e12, 3e-4)
    assert (hardware.attention_flops, hardware.operator_s) == (1e11, 4e-6)
    assert (hardware.host_link, hardware.host_bandwidth) == (1.6e10, 1.5e10)
    assert (hardware.host_memory_bandwidth, hardware.update_elems_per_s) == (5.6e9, 2.6e8)
    assert (hardware.disk_read, hardware.disk_bytes) == (3e9, 9)
    assert hardware.node_link == 1e9
    alone = combine(replace(KEY, ranks=1), [replace(RANK, exchange=ExchangeRates(None, 0.0))], disk_bytes=9)
    assert (alone.hardware.node_link, alone.hardware.host_bandwidth) == (None, None)
    assert alone.hardware.name == "abacus, 2 cores, 1 rank"


def test_a_listed_gpu_keeps_its_peak_and_tells_how_much_of_it_was_reached() -> None:
    name = "NVIDIA H100 80GB HBM3"
    peak = peak_flops_of(name, torch.bfloat16)
    assert peak is not None
    node = combine(replace(KEY, device_type="cuda", device=name), [RANK], disk_bytes=9)
    assert node.hardware.bf16_flops == peak
    assert node.hardware.efficiency == pytest.approx(4e11 / peak)
    volta = combine(replace(KEY, device_type="cuda", device="Tesla V100-SXM2-32GB"), [RANK], disk_bytes=9)
    assert volta.hardware.bf16_flops is None  # no bf16 units: fp16 tells how much is reached
    assert volta.hardware.efficiency == pytest.approx(5e11 / 125e12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_matrix_products_are_timed_in_every_dtype(dtype: torch.dtype) -> None:
    assert matmul_flops(CPU, dtype, SMALL) > 1e6


def test_links_and_updates_are_timed() -> None:
    assert link_rate(CPU, SMALL) > 1e6
    assert min(update_rate(SMALL), update_rate(SMALL, smallest=True)) > 1e4


@pytest.mark.gpu
def test_a_gpu_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("RANK", raising=False)
    hardware = measured(1, [str(tmp_path)]).hardware
    assert hardware.device_type == "cuda"
    assert 0 < hardware.reserved_bytes < hardware.device_bytes
    assert hardware.host_link is not None
    assert hardware.host_link > 1e9


def test_the_file_it_prints_is_the_node_it_measured() -> None:
    printed = HardwareConfig(**OmegaConf.to_container(OmegaConf.create(as_yaml(MEASUREMENT))))  # type: ignore[arg-type]
    assert printed == HARDWARE


def test_the_table_names_every_figure() -> None:
    table = machine_table(MEASUREMENT)
    named = {row[1] for row in table.rows if row[1]}
    assert named == set(HardwareConfig.__dataclass_fields__) - {"name", "device_type"}
    assert ("collectives across nodes, of each rank", "network", "unknown") in table.rows


@pytest.mark.parametrize(
    ("figure", "value", "told"),
    [
        ("device_bytes", 8 << 30, "8.00 GiB"),
        ("bf16_flops", 1.5e11, "150 GFLOP/s"),
        ("collective_latency_s", 2e-4, "200 µs"),
        ("collective_latency_s", 0.0, "0 s"),
        ("update_elems_per_s", 6e8, "600 M/s"),
        ("host_link", 1e10, "10.0 GB/s"),
        ("efficiency", 0.56, "0.56"),
        ("network", None, "unknown"),
    ],
)
def test_figures_are_shown_in_their_unit(figure: str, value: float | None, told: str) -> None:
    assert text(figure, value) == told


@pytest.mark.parametrize(
    ("seconds", "told"), [(3, "just now"), (245, "4:05 ago"), (90_000, "25:00:00 ago"), (260_000, "3 days ago")]
)
def test_ages_are_told(seconds: float, told: str) -> None:
    assert age(seconds) == told
