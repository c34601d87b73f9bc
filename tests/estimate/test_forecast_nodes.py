"""Nodes described in figures: every file of conf/hardware, what a rank has of its node, and which link a group uses."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from from_words import CONF, refusal, run_of

NODES = sorted(path.stem for path in (CONF / "hardware").glob("*.yaml") if path.stem != "found")
GB = 10**9
ROUND: dict[str, Any] = {
    "devices_per_node": 4,
    "device_bytes": 10 * GB,
    "reserved_bytes": GB,
    "bf16_flops": 100e12,
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
    "link_efficiency": 1.0,
    "memory_efficiency": 1.0,
}
"""Figures of a node of four devices."""


@pytest.fixture(scope="module")
def nodes() -> dict[str, Any]:
    """By name, as a run has them."""
    return {name: run_of(f"hardware={name}").hardware for name in NODES}


@pytest.fixture(scope="module")
def like(nodes: dict[str, Any]) -> Any:
    """A function that makes a node of ROUND with other figures."""
    return lambda **changes: dataclasses.replace(nodes["h100_80g"], **{**ROUND, **changes})


@pytest.mark.parametrize("name", NODES)
def test_every_figure_of_a_node_is_given_and_says_where_it_comes_from(nodes: dict[str, Any], name: str) -> None:
    """A publication with its year, an assumption called one, or arithmetic or a reason in words."""
    lines = (CONF / "hardware" / f"{name}.yaml").read_text().splitlines()
    given = {line.partition(":")[0] for line in lines if re.match(r"\w+:", line)}
    assert given | {"device_type"} == {field.name for field in dataclasses.fields(nodes[name])}
    for line in lines:
        if line.startswith("#"):
            continue
        figure, _, source = line.partition("  # ")
        assert len(source) > 6, f"{name}: {figure} has no source"
        published = re.search(r"(datasheet|whitepaper|ZeRO-Infinity|torchtitan).*20\d\d", source)
        said = re.match(r"assumed|\d|PCIe", source) or name == "laptop"
        absent = "null" in figure or figure.startswith("device_bytes")
        assert published or said or absent, f"{name}: {figure} from {source!r}"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("device_type=tpu", "hardware.device_type='tpu': choose one of ['cuda', 'cpu']"),
        ("device_bytes=0", "hardware.device_bytes=0: must be a number in (0, 9.22337e+18]"),
        ("network=nan", "hardware.network=nan: must be a number in (0, 1e+18], or null"),
        ("disk_read=inf", "hardware.disk_read=inf"),
        ("host_link=-1.0", "hardware.host_link=-1.0: must be a number in (0, 1e+18], or null where it is unknown"),
        ("collective_latency_s=-1.0", "hardware.collective_latency_s=-1.0: must be a number in [0, 1e+18]"),
        ("efficiency=1.5", "hardware.efficiency=1.5: a part of the peak, must be in (0, 1]"),
        ("reserved_bytes=90000000000", "hardware.reserved_bytes=90000000000: must be less than"),
    ],
)
def test_impossible_figures_are_refused(change: str, told: str) -> None:
    assert told in refusal("hardware=h100_80g", f"hardware.{change}")


def test_a_datasheets_rates_are_reached_in_part_and_of_a_bound_in_full(like: Any) -> None:
    derated = like(memory_efficiency=0.8, link_efficiency=0.5)
    assert (derated.reachable_flops(torch.bfloat16), derated.peak_flops(torch.int64)) == (50e12, None)
    assert like(bf16_flops=None).reachable_flops(torch.bfloat16) is None
    assert derated.usable_bytes == 9 * GB
    assert not derated.reaches_its_rates
    assert derated.reachable_bandwidth == 800e9
    assert (derated.link(4), derated.link(8)) == (100e9, 50e9)
    assert (derated.share(8).host_link, derated.share(8).host_memory) == (5e9, 80e9)
    bound = derated.at_datasheet_rates()
    assert bound.reachable_flops(torch.bfloat16) == 100e12
    assert (bound.link(4), bound.reachable_bandwidth, bound.share(8).host_memory) == (200e9, 1000e9, 100e9)
    assert (bound.operator_s, bound.collective_latency_s) == (0.0, 0.0)
    measured = like(device_type="cpu", efficiency=1.0)
    assert measured.devices_are_host
    assert measured.reaches_its_rates
    assert measured.at_datasheet_rates() == measured


def test_a_rank_has_its_part_of_the_fullest_node(like: Any) -> None:
    two, eight = like().share(2), like().share(8)
    assert (two.host_bytes, two.disk_read) == (32 * GB, 4e9)
    assert (eight.host_bytes, eight.disk_bytes, eight.disk_write) == (16 * GB, 250 * GB, 1e9)
    assert (eight.update_elems_per_s, like().nodes(9), like().local_ranks(9)) == (1e9, 3, 4)
    assert (like().share(1).host_link, two.host_link, eight.host_link) == (20e9, 20e9, 10e9)  # of 40e9 together
    unknown = like(host_bytes=None, host_link=None, disk_read=None).share(4)
    assert (unknown.host_bytes, unknown.host_link, unknown.disk_read) == (None, None, None)


@pytest.mark.parametrize(
    ("ranks", "stride", "world", "rate"),
    [
        (4, 1, 8, 200e9),  # 0-3, 4-7
        (3, 1, 3, 200e9),  # all of one node
        (2, 2, 8, 200e9),  # 0 2, 1 3, 4 6, 5 7
        (1, 4, 8, 200e9),  # alone: nothing travels
        (3, 1, 6, 25e9),  # 3-5 lie in two nodes: one and two
        (2, 4, 8, 25e9),  # 0 4: copies in different nodes
        (8, 1, 24, 100e9),  # two whole nodes: four rings, each through a port of its own
        (6, 1, 24, 50e9),  # four and two
        (4, 2, 24, 50e9),  # every other one of eight
    ],
)
def test_a_group_has_the_slowest_link_it_needs(like: Any, ranks: int, stride: int, world: int, rate: float) -> None:
    assert like().link(ranks, stride=stride, world=world) == rate


def test_an_unknown_link_stays_unknown_and_no_network_is_faster_than_a_node(like: Any) -> None:
    assert like(network=None).link(8) is None
    assert like(node_link=None).link(8) is None
    assert like(devices_per_node=1, node_link=None).link(8) == 25e9
    assert like(network=300e9).link(8) == 200e9
