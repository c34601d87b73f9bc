"""Ranks use the disks of their memory node where each node has its share of them, and otherwise all disks."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from pool import Pool
from training_loops import sharded_net, train

from dzero import AdamW, DiskConfig, DiskError, OffloadConfig
from dzero.hardware import memory_node_of
from dzero.offload import disk_nodes, manager
from dzero.offload.disk_nodes import by_node, near_cores, node_of_path, nodes_of_local_ranks
from dzero.plan import preflight
from dzero.zero.offload_config import KINDS

CORES = ("0-3", "4-7")
PATHS = ("/nvme0", "/nvme1", "/nvme2", "/nvme3")


class Sysfs:
    """A sysfs in a folder: memory nodes, and block devices at places of the bus."""

    def __init__(self, root: Path, *cores: str) -> None:
        self.root = root
        for node, listed in enumerate(cores):
            self.write(f"devices/system/node/node{node}/cpulist", listed)
        (root / "dev/block").mkdir(parents=True)

    def write(self, file: str, text: str) -> None:
        (self.root / file).parent.mkdir(parents=True, exist_ok=True)
        (self.root / file).write_text(f"{text}\n")

    def disk(self, name: str, number: str, node: int | None) -> Path:
        """A disk on a bus of `node`, whose own bridge does not know it."""
        if node is not None:
            self.write(f"devices/pci{name}/numa_node", str(node))
        self.write(f"devices/pci{name}/bridge/numa_node", "-1")
        return self.device(f"devices/pci{name}/bridge/nvme/{name}/{name}n1", number)

    def device(self, folder: str, number: str) -> Path:
        device = self.root / folder
        device.mkdir(parents=True)
        (self.root / "dev/block" / number).symlink_to(device)
        return device

    def virtual(self, name: str, number: str, *below: Path) -> Path:
        """A device over others, as md and device mapper make them."""
        device = self.device(f"devices/virtual/block/{name}", number)
        (device / "slaves").mkdir()
        for each in below:
            (device / "slaves" / each.name).symlink_to(each)
        return device


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    return Sysfs(tmp_path / "sys", *CORES)


@pytest.fixture
def mount(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give paths, as keywords without their slash, the numbers of devices."""
    return lambda **numbers: monkeypatch.setattr(disk_nodes, "device_number", lambda path: numbers[path.lstrip("/")])


def test_a_path_is_on_the_node_of_its_disk(sysfs: Sysfs, mount: Callable[..., None]) -> None:
    first = sysfs.disk("nvme0", "259:0", 0)
    second = sysfs.disk("nvme1", "259:1", 1)
    third = sysfs.disk("nvme2", "259:2", 1)
    sysfs.disk("vda", "254:0", None)
    part = sysfs.device(f"{second.relative_to(sysfs.root)}/nvme1n1p1", "259:9")
    (part / "partition").write_text("1\n")
    inner = sysfs.virtual("dm-0", "252:0", third)
    sysfs.virtual("md0", "9:0", part, inner)
    sysfs.virtual("md1", "9:1", first, second)
    sysfs.virtual("loop0", "7:0")
    (sysfs.root / "devices/virtual/block/md0/md0p1").mkdir()
    (sysfs.root / "devices/virtual/block/md0/md0p1/partition").write_text("1\n")
    (sysfs.root / "dev/block/259:5").symlink_to(sysfs.root / "devices/virtual/block/md0/md0p1")
    head = sysfs.device("devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1", "259:7")
    (head.parent / "nvme1").symlink_to(second.parent)
    numbers = {
        "disk": ("259:0", 0),
        "other": ("259:1", 1),
        "partition": ("259:9", 1),
        "volume": ("252:0", 1),
        "stripes": ("9:0", 1),  # over a partition and a volume of one node
        "part_of_stripes": ("259:5", 1),
        "across": ("9:1", -1),  # over disks of two nodes
        "multipath": ("259:7", 1),
        "virtual": ("254:0", -1),
        "loop": ("7:0", -1),
        "network": ("0:44", -1),  # which sysfs does not list
    }
    mount(**{name: number for name, (number, _) in numbers.items()})
    found = {name: node_of_path(f"/{name}", sysfs.root) for name in numbers}
    assert found == {name: node for name, (_, node) in numbers.items()}


def test_the_number_of_a_device_is_that_of_the_file_system(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    assert disk_nodes.device_number(str(tmp_path)) == f"{os.major(device)}:{os.minor(device)}"
    assert node_of_path(str(tmp_path / "missing")) == -1


def test_cores_are_on_a_node_if_all_are(sysfs: Sysfs, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, node in (([0, 3], 0), ([4], 1), ([3, 4], -1), ([], -1), ([9], -1)):
        assert memory_node_of(cores, sysfs.root) == node
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert nodes_of_local_ranks(4, beside_gpu=True, sys=sysfs.root) == [0, 0, 1, 1]
    assert nodes_of_local_ranks(2, beside_gpu=False, sys=sysfs.root) == [-1, -1]
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 4, 5, 6})
    assert nodes_of_local_ranks(3, beside_gpu=True, sys=sysfs.root) == [0, -1, 1]  # the second has cores of both
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {5, 6})
    assert nodes_of_local_ranks(2, beside_gpu=False, sys=sysfs.root) == [1, 1]


@pytest.mark.parametrize(
    ("places", "ranks", "want"),
    [
        ([0, 1, 0, 1], [0, 0, 1, 1], {0: PATHS[::2], 1: PATHS[1::2]}),
        ([0, 0, 0, 1], [0, 0, 0, 1], {0: PATHS[:3], 1: PATHS[3:]}),  # uneven nodes of uneven ranks
        ([0, 1, 0, None], [0, 1], {}),  # the node of a path is unknown
        ([0, 1, 0, 1], [0, -1], {}),  # the node of a rank is unknown
        ([0, 0, 0, 0], [0, 0], {}),  # a single node, which has all paths
        ([0, 0, 0, 0], [0, 1], {}),  # no path for the second rank
        ([0, 1, 0, 1], [0, 0], {}),  # no rank for two paths
        ([0, 0, 0, 1], [0, 1], {}),  # the second rank would have a third of the disks of the first
    ],
)
def test_each_node_has_its_paths_if_it_has_its_share(
    sysfs: Sysfs, mount: Callable[..., None], places: list[int | None], ranks: list[int], want: dict[int, tuple[str]]
) -> None:
    for index, node in enumerate(places):
        sysfs.disk(f"nvme{index}", f"259:{index}", node)
    mount(**{f"nvme{index}": f"259:{index}" for index in range(4)})
    config = DiskConfig(paths=[*PATHS], weights=[1.0, 2.0, 3.0, 4.0], threads=3)
    found = by_node(config, ranks, sysfs.root)
    assert {node: tuple(each.paths) for node, each in found.items()} == want
    for each in found.values():
        assert each.weights == [1.0 + PATHS.index(path) for path in each.paths]
        assert each.threads == 3
    assert by_node(DiskConfig(paths=[*PATHS], by_node=False), ranks, sysfs.root) == {}


def near(monkeypatch: pytest.MonkeyPatch, *nodes: int) -> None:
    """Two paths on two nodes, and local ranks beside GPUs on `nodes`, of which this is the first."""
    monkeypatch.setattr(disk_nodes, "node_of_path", lambda path, _: PATHS.index(path))
    monkeypatch.setattr(disk_nodes, "memory_node_of", lambda *_: nodes[0])
    monkeypatch.setattr(disk_nodes, "nodes_of_local_ranks", lambda *_, **__: [*nodes])


def test_neighbors_whose_cores_are_known_here_count_before_what_ranks_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one pipeline stage are on one node; those of the other, which tell nothing here, on the other."""
    config = DiskConfig(paths=[*PATHS[:2]])
    near(monkeypatch, 0, 0, 1, 1)
    found, selection = near_cores(config, [0, 1], [0, 0])
    assert (found.paths, selection) == (["/nvme0"], "of 2 paths those of memory node 0")
    near(monkeypatch, 1, 1)  # bound one by one, by what started them
    assert near_cores(config, [0, 1], [0, 1])[0].paths == ["/nvme1"]
    assert near_cores(config, [0, 1], [1, 1]) == (config, "")


def test_preflight_counts_the_space_of_the_fullest_node(monkeypatch: pytest.MonkeyPatch) -> None:
    near(monkeypatch, 0, 1, 0, 1)
    monkeypatch.setattr(preflight, "nodes_of_local_ranks", lambda *_, **__: [0, 1, 0, 1])
    monkeypatch.setattr(preflight, "free_bytes", lambda paths: sum(100 if path == "/nvme0" else 60 for path in paths))
    assert preflight.scratch_bytes(DiskConfig(paths=[*PATHS[:2]]), 4, "cuda") == 2 * 60  # each of four has 30
    assert preflight.scratch_bytes(DiskConfig(paths=[*PATHS[:2]], by_node=False), 4, "cuda") == 160


NAMES = ["first0", "second0", "first1", "second1"]


def scratch(rank: int, ranks: int, folder: str, by_node: bool) -> tuple[list[str], list[list[str]], str]:
    """Names of the paths that this rank's store has, the ranks with scratch files on each, and the line of the log."""
    paths = [f"{folder}/{name}" for name in NAMES]
    disk = DiskConfig(paths=paths, weights=[1.0, 1.0, 3.0, 3.0], block_bytes=4096, by_node=by_node)
    with pytest.MonkeyPatch.context() as patch:
        for module in (disk_nodes, manager):
            patch.setattr(module, "memory_node_of", lambda *_: rank)
        patch.setattr(disk_nodes, "node_of_path", lambda path, _: int("second" in path))
        sharded = sharded_net("even", stage=3, offload=OffloadConfig(disk=disk, **dict.fromkeys(KINDS, "disk")))  # type: ignore[arg-type]
        optim = AdamW(sharded, lr=1e-2)
    train(sharded, optim, steps=1)
    optim.synchronize()
    dist.barrier()
    holders = [sorted(entry.split("-")[1] for entry in os.listdir(path)) for path in paths]
    dist.barrier()
    store = optim.offload.staging.store
    assert store is not None
    optim.offload.executor.close()
    return [Path(path).name for path in store.use()], holders, store.describe().replace(f"{folder}/", "")


@pytest.mark.parametrize("chosen", [True, False])
def test_only_the_paths_of_its_node_hold_a_ranks_scratch_files(pool: Pool, tmp_path: Path, chosen: bool) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
    for rank, (used, holders, told) in enumerate(pool.run(scratch, 2, str(tmp_path), chosen)):
        own = ("first", "second")[rank]
        assert used == ([f"{own}0", f"{own}1"] if chosen else NAMES)
        assert holders == ([["0"], ["1"], ["0"], ["1"]] if chosen else [["0", "1"]] * 4)
        every = "first0 (12%), second0 (12%), first1 (38%), second1 (38%); "
        assert told.startswith(
            f"of 4 paths those of memory node {rank}: {own}0 (25%), {own}1 (75%); " if chosen else every
        )


def test_too_little_space_near_a_rank_tells_how_to_use_the_rest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near(monkeypatch, 0, 1)
    monkeypatch.setattr(disk_nodes, "node_of_path", lambda path, _: int("second" in path))
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    disk = DiskConfig(paths=[str(tmp_path / "first"), str(tmp_path / "second")], block_bytes=1 << 30)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    with pytest.raises(DiskError, match=r"larger paths, or use others than of 2 .* 0: offload\.disk\.by_node=false"):
        manager._store(OffloadConfig(activations="disk", disk=disk), {"a": 1 << 48}, [0], [0, 1])
