"""Nodes described in figures: every file of conf/hardware, what a rank has of its node, and which link a group uses."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from dzero import config
from dzero.estimate.hardware_spec import HardwareConfig
from dzero.hardware import PEAKS

CONF = Path(__file__).parents[2] / "conf"
NODES = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if path.stem != "found")
GB = 10**9


@pytest.fixture(autouse=True, scope="module")
def _schema() -> None:
    config.register()


def chosen(*settings: str) -> HardwareConfig | None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return config.resolve(compose("config", overrides=list(settings))).hardware


def node(**changes: Any) -> HardwareConfig:
    """Two nodes' worth of round figures: four devices of 10 GB."""
    figures: dict[str, Any] = {
        "name": "round",
        "devices_per_node": 4,
        "device_bytes": 10 * GB,
        "reserved_bytes": GB,
        "bf16_flops": 100e12,
        "fp16_flops": 100e12,
        "fp32_flops": 10e12,
        "efficiency": 0.5,
        "attention_flops": 50e12,
        "operator_s": 2e-6,
        "device_bandwidth": 1000e9,
        "host_link": 20e9,
        "host_bandwidth": 40e9,
        "node_link": 200e9,
        "network": 25e9,
        "collective_latency_s": 1e-5,
        "host_bytes": 64 * GB,
        "disk_bytes": 1000 * GB,
        "disk_read": 8e9,
        "disk_write": 4e9,
        "host_memory_bandwidth": 400e9,
        "update_elems_per_s": 4e9,
    }
    return HardwareConfig(**{**figures, **changes})


def test_the_default_is_this_machine() -> None:
    assert chosen() is None
    assert chosen("hardware=found") is None


@pytest.mark.parametrize("name", NODES)
def test_every_node_composes_and_gives_every_figure(name: str) -> None:
    hardware = chosen(f"hardware={name}")
    assert hardware is not None
    text = (CONF / "hardware" / f"{name}.yaml").read_text()
    given = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert given | {"device_type"} == {field.name for field in dataclasses.fields(HardwareConfig)}


@pytest.mark.parametrize("name", NODES)
def test_every_figure_says_where_it_comes_from(name: str) -> None:
    """A publication with its year, an assumption called one, or arithmetic or a reason in words."""
    for line in (CONF / "hardware" / f"{name}.yaml").read_text().splitlines():
        if line.startswith("#"):
            continue
        figure, _, source = line.partition("  # ")
        assert len(source) > 6, f"{name}: {figure} has no source"
        published = re.search(r"(datasheet|whitepaper|ZeRO-Infinity|torchtitan).*20\d\d", source)
        said = re.match(r"assumed|\d|PCIe", source) or name == "laptop"
        absent = "null" in figure or figure.startswith("device_bytes")
        assert published or said or absent, f"{name}: {figure} from {source!r}"


@pytest.mark.parametrize(
    ("name", "card"),
    {
        "v100_32g": "Tesla V100-SXM2-32GB",
        "dgx2_v100": "Tesla V100-SXM2-32GB",
        "a100_40g": "NVIDIA A100-SXM4-40GB",
        "a100_80g": "NVIDIA A100-SXM4-80GB",
        "h100_80g": "NVIDIA H100 80GB HBM3",
        "h200_141g": "NVIDIA H200",
        "b200": "NVIDIA B200",
        "rtx4090": "NVIDIA GeForce RTX 4090",
        "rtx5090": "NVIDIA GeForce RTX 5090",
    }.items(),
)
def test_peaks_are_those_that_training_is_measured_against(name: str, card: str) -> None:
    peak = next(peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, card))
    hardware = chosen(f"hardware={name}")
    assert hardware is not None
    figures = hardware.bf16_flops, hardware.fp16_flops, hardware.fp8_flops
    for given, listed in zip(figures, (peak.bf16, peak.fp16, peak.fp8), strict=True):
        assert given == (None if listed is None else pytest.approx(listed * 1e12))
    assert hardware.fp32_flops == pytest.approx(peak.fp32 * 1e12)


def test_figures_of_a_node_can_be_changed() -> None:
    hardware = chosen("hardware=rtx4090", "hardware.device_bytes=8000000000", "hardware.disk_bytes=null")
    assert hardware is not None
    assert (hardware.device_bytes, hardware.disk_bytes) == (8 * GB, None)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"device_type": "tpu"}, "hardware.device_type='tpu': choose one of ['cuda', 'cpu']"),
        ({"device_bytes": 0}, "hardware.device_bytes=0: must be a number in (0, 9.22337e+18]"),
        ({"host_link": -1.0}, "hardware.host_link=-1.0: must be a number in (0, 1e+18], or null where it is unknown"),
        ({"network": float("nan")}, "hardware.network=nan: must be a number in (0, 1e+18], or null"),
        ({"disk_read": float("inf")}, "hardware.disk_read=inf"),
        ({"collective_latency_s": -1.0}, "hardware.collective_latency_s=-1.0: must be a number in [0, 1e+18]"),
        ({"efficiency": 1.5}, "hardware.efficiency=1.5: a part of the peak, must be in (0, 1]"),
        ({"link_efficiency": 1.01}, "hardware.link_efficiency=1.01: a part of the peak, must be in (0, 1]"),
        ({"memory_efficiency": 0.0}, "hardware.memory_efficiency=0.0: must be a number"),
        ({"reserved_bytes": 10 * GB}, "hardware.reserved_bytes=10000000000: must be less than"),
    ],
)
def test_impossible_figures_are_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match="hardware") as refused:
        node(**changes)
    assert told in str(refused.value)


def test_reachable_work_is_the_peak_times_the_efficiency() -> None:
    assert node().reachable_flops(torch.bfloat16) == 50e12
    assert node(bf16_flops=None).reachable_flops(torch.bfloat16) is None
    assert node().peak_flops(torch.int64) is None
    assert node().usable_bytes == 9 * GB
    assert not node().devices_are_host
    assert node(device_type="cpu").devices_are_host


def test_a_datasheets_rates_are_reached_in_part_and_of_a_bound_in_full() -> None:
    derated = node(memory_efficiency=0.8, link_efficiency=0.5)
    assert not derated.reaches_its_rates
    assert derated.reachable_bandwidth == 800e9
    assert (derated.link(4), derated.link(8)) == (100e9, 50e9)
    assert (derated.share(8).host_link, derated.share(8).host_memory) == (5e9, 80e9)
    bound = derated.at_datasheet_rates()
    assert bound.reachable_flops(torch.bfloat16) == 100e12
    assert (bound.link(4), bound.reachable_bandwidth, bound.share(8).host_memory) == (200e9, 1000e9, 100e9)
    assert (bound.operator_s, bound.collective_latency_s) == (0.0, 0.0)
    measured = node(device_type="cpu", efficiency=1.0)
    assert measured.reaches_its_rates
    assert measured.at_datasheet_rates() == measured


def test_a_rank_has_its_part_of_the_fullest_node() -> None:
    two, eight = node().share(2), node().share(8)
    assert (two.host_bytes, two.disk_read) == (32 * GB, 4e9)
    assert (eight.host_bytes, eight.disk_bytes, eight.disk_write) == (16 * GB, 250 * GB, 1e9)
    assert (eight.update_elems_per_s, node().nodes(9), node().local_ranks(9)) == (1e9, 3, 4)
    assert (node().share(1).host_link, two.host_link, eight.host_link) == (20e9, 20e9, 10e9)  # of 40e9 together
    unknown = node(host_bytes=None, host_link=None, disk_read=None).share(4)
    assert (unknown.host_bytes, unknown.host_link, unknown.disk_read) == (None, None, None)


@pytest.mark.parametrize(
    ("ranks", "stride", "world", "within"),
    [
        (4, 1, 8, True),  # 0-3, 4-7
        (2, 1, 8, True),
        (3, 1, 3, True),  # all of one node
        (3, 1, 6, False),  # 3-5 lie in two nodes
        (8, 1, 8, False),
        (2, 2, 8, True),  # 0 2, 1 3, 4 6, 5 7
        (2, 4, 8, False),  # 0 4: copies in different nodes
        (1, 4, 8, True),  # alone: nothing travels
    ],
)
def test_the_link_of_a_group_is_the_slowest_it_needs(ranks: int, stride: int, world: int, within: bool) -> None:
    assert node().within_node(ranks, stride=stride, world=world) is within
    assert within is (node().link(ranks, stride=stride, world=world) == 200e9)


@pytest.mark.parametrize(
    ("ranks", "stride", "together"),
    [
        (8, 1, 4),  # two whole nodes: four rings, each through a port of its own
        (6, 1, 2),  # four and two
        (3, 1, 1),  # 3-5: one and two
        (4, 2, 2),  # every other one of eight
        (2, 4, 1),  # copies in different nodes
    ],
)
def test_members_in_a_node_leave_it_together(ranks: int, stride: int, together: int) -> None:
    assert node().link(ranks, stride=stride, world=24) == together * 25e9
    assert node(network=150e9).link(8) == 200e9


def test_an_unknown_link_stays_unknown() -> None:
    assert node(network=None).link(8) is None
    assert node(node_link=None).link(8) is None
    assert node(devices_per_node=1, node_link=None).link(8) == 25e9
    assert node(network=300e9).link(8) == 200e9
