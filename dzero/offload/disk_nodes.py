"""Scratch paths by memory node (NUMA): a rank uses the disks that are attached to the node of its cores.

    rank    the node that all of its cores are on: those it is given beside a GPU, else those its process may run on
    path    the node of the block device under its file system; of several devices (md, LVM, multipath) if they agree

Paths are divided by node only if each node has the same part of the paths as of the ranks: of four paths for eight
ranks, two where four ranks are. Otherwise every rank uses all paths. A rank whose node has fewer paths than others have
would be slower, and the others wait for it; a path whose node has no rank would be idle. The same holds if the node of
a path or of a rank is unknown, as in most virtual machines and on network file systems.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dzero.hardware import UNKNOWN_NODE, cores_of_rank, memory_node_of
from dzero.utils.launched import local_ranks
from dzero.zero.offload_config import DiskConfig

SYS = Path("/sys")


def near_cores(config: DiskConfig, cores: Sequence[int], told: Sequence[int]) -> tuple[DiskConfig, str]:
    """Return `config` with the paths that this rank uses, and in words how they were selected, or "" for all paths.

    Args:
        config: All scratch paths.
        cores: Cores of this rank beside a GPU; none without.
        told: Memory node of each data-parallel rank, as that rank finds it. It decides if this process alone cannot
            tell the nodes of its neighbors, because what started them gave each the cores of one node.
    """
    node = memory_node_of(cores or os.sched_getaffinity(0))
    local = nodes_of_local_ranks(local_ranks(), beside_gpu=bool(cores))
    near = by_node(config, local if len({*local}) > 1 else told).get(node)
    return (config, "") if near is None else (near, f"of {len(config.paths)} paths those of memory node {node}")


def by_node(config: DiskConfig, nodes: Sequence[int], sys: Path = SYS) -> dict[int, DiskConfig]:
    """Return `config` with the paths of each memory node, and their weights; empty if every rank uses all paths.

    Args:
        config: Scratch paths, and whether they may be divided.
        nodes: Memory node of each rank.
        sys: Root of sysfs.
    """
    places = [node_of_path(path, sys) for path in config.paths] if config.by_node else []
    paths, ranks = Counter(places), Counter(nodes)
    even = all(paths[node] * len(nodes) == ranks[node] * len(places) for node in paths | ranks)
    if len(paths) < 2 or UNKNOWN_NODE in paths or not even:
        return {}
    return {node: _subset(config, [index for index, place in enumerate(places) if place == node]) for node in paths}


def _subset(config: DiskConfig, kept: Sequence[int]) -> DiskConfig:
    weights = None if config.weights is None else [config.weights[index] for index in kept]
    return replace(config, paths=[config.paths[index] for index in kept], weights=weights)


def nodes_of_local_ranks(local_ranks: int, *, beside_gpu: bool, sys: Path = SYS) -> list[int]:
    """Return the memory node of each rank of this host, as far as this process can tell.

    Beside GPUs the ranks divide the cores of this process. Otherwise each is taken to have the same cores.
    """
    if beside_gpu:
        return [memory_node_of(cores_of_rank(rank, local_ranks, sys), sys) for rank in range(local_ranks)]
    return [memory_node_of(os.sched_getaffinity(0), sys)] * local_ranks


def node_of_path(path: str, sys: Path = SYS) -> int:
    """Return the memory node of the disk under a path, or -1 if it is unknown or the path is missing."""
    try:
        number = device_number(path)
    except OSError:
        return UNKNOWN_NODE
    return _node_of_device((sys / "dev/block" / number).resolve())


def device_number(path: str) -> str:
    """Return the number of the device under a path's file system, as sysfs writes it: `259:1`."""
    device = os.stat(path).st_dev
    return f"{os.major(device)}:{os.minor(device)}"


def _node_of_device(device: Path) -> int:
    """Return the memory node of a device of sysfs: that of all devices below it, else of the nearest bus above it."""
    if (device / "partition").exists():
        device = device.parent
    # Of an NVMe disk with several controllers, the kernel shows one virtual device beside links to the controllers.
    below = [*device.glob("slaves/*")] or [link for link in device.parent.glob("nvme*") if link.is_symlink()]
    if below:
        nodes = {_node_of_device(link.resolve()) for link in below}
        return nodes.pop() if len(nodes) == 1 else UNKNOWN_NODE
    files = [folder / "numa_node" for folder in (device, *device.parents)]
    nodes_above = (int(file.read_text()) for file in files if file.exists())
    return next((node for node in nodes_above if node >= 0), UNKNOWN_NODE)
