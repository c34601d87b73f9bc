"""What is planned of a step off the device: slots, sizes, actions, and their text, on each of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from torch import nn

from dzero import AdamW, DiskConfig, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard, testing

HOST = dict.fromkeys(("grad", "master", "moments"), "host")
DISK = dict.fromkeys(("param", "grad", "master", "moments"), "disk")
KIB = 1024
LAYER, ROOT = 32 * 32, 64 * 32
"""Elements of a rank's shards: 63 rows of 32 are padded to 64, half of which each rank has."""
MANY = 5


class Net(nn.Module):
    """Layers of which each is `growth` times 32 wider than the one before, a table that trains, and a frozen one."""

    def __init__(self, layers: int, growth: int) -> None:
        super().__init__()
        widths = [32 * (1 + growth * index) for index in range(layers)]
        self.layers = nn.ModuleList(nn.Linear(width, 63, bias=False) for width in widths)
        self.embed, self.table = nn.Embedding(128, 32), nn.Embedding(16, 32).requires_grad_(False)


class Schedule:
    """The lines that are printed of a schedule."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        slots = [line.split() for line in lines if line.startswith("slot ")]
        self.sizes = {" ".join(words[1:-2]): int(float(words[-2]) * {"B": 1, "KiB": KIB}[words[-1]]) for words in slots}
        actions = [line for line in lines[:-1] if not line.startswith("slot ")]
        self.slots_of = {" ".join(line[:37].split()): set(line[37:].split(", ")) for line in actions}

    def named(self, first: str) -> list[str]:
        """Slots whose names begin so."""
        return [name for name in self.sizes if name.startswith(first)]


def lines_of(rank: int, ranks: int, folder: str, given: dict[str, Any]) -> list[str]:
    given = dict(given)
    layers, growth, microbatches = given.pop("layers", 1), given.pop("growth", 0), given.pop("microbatches", 1)
    mesh, precision = make_mesh("cpu", replicate=given.pop("replicate", 1)), given.pop("precision", {})
    disk = {"disk": DiskConfig(paths=[folder], block_bytes=4096)} if "disk" in given.values() else {}
    sharded = shard(
        Net(layers, growth),
        ZeroConfig(stage=given.pop("stage", 2)),
        precision=PrecisionConfig(**precision),
        offload=OffloadConfig(**given, **disk),
        mesh=mesh,
        microbatches=microbatches,
    )
    return testing.schedule(AdamW(sharded))


Planned = Callable[..., Schedule]


@pytest.fixture
def planned(pool: Pool, tmp_path: Path) -> Planned:
    """The schedule of a rank; `layers`, `growth` and so on as of `lines_of`, all else as of `OffloadConfig`."""
    return lambda **given: Schedule(pool.run(lines_of, 2, str(tmp_path), given)[0])


def test_slots_hold_what_the_formula_says_and_a_step_prints_its_actions(planned: Planned) -> None:
    """bf16: 2 for the gradient, 2 for the working copy, 4 for the master, 8 for the moments, on each rank's shards."""
    found = planned(**HOST)
    each = {"grad": 2, "master": 4, "work": 2, "moments": 8}
    want = {f"{kind} layers.0": count * LAYER for kind, count in each.items()}
    want |= {f"{kind} root": count * ROOT for kind, count in each.items()}
    assert found.sizes == want
    total = sum(-(-size // 4096) * 4096 for size in want.values())  # in whole pages
    assert found.lines[-7:] == [
        "EVICT    grad       root             grad root",
        "EVICT    grad       layers.0         grad layers.0",
        "COMPUTE  update     root             grad root, master root, work root, moments root",
        "FETCH    work       root             work root",
        "COMPUTE  update     layers.0         grad layers.0, master layers.0, work layers.0, moments layers.0",
        "FETCH    work       layers.0         work layers.0",
        f"6 actions a step, {total / KIB:.1f} KiB of host memory",
    ]


def test_dtypes_of_states_decide_their_slots(planned: Planned) -> None:
    """fp32 parameters send their master and need no other copy; smaller states take smaller slots."""
    found = planned(**HOST, precision={"param": "fp32"})
    assert not found.named("work")
    assert found.slots_of["FETCH work root"] == {"master root"}
    found = planned(**HOST, precision={"master": "remainder", "moments": "bf16"})
    assert (found.sizes["master root"], found.sizes["moments root"]) == (2 * ROOT, 4 * ROOT)


def test_later_microbatches_land_beside_only_where_they_are_added_on_the_host(planned: Planned) -> None:
    found = planned(**HOST, microbatches=4)
    assert sorted(found.sizes[name] for name in found.named("landing")) == [4 * LAYER, 4 * ROOT]
    assert not planned(**HOST, microbatches=4, replicate=2).named("landing")


def test_what_is_in_part_elsewhere_takes_slots_of_that_part(planned: Planned) -> None:
    """Moments on the device pass through a stage; a fraction takes the last parameters first."""
    found = planned(**HOST | {"moments": "device"})
    assert found.sizes["stage 1"] == 8 * ROOT
    assert "stage 1" in found.slots_of["COMPUTE update root"]
    found = planned(**HOST, grad_fraction=0.5, master_fraction=0.5, moments_fraction=0.5)
    assert {name.split(" ", 1)[1] for name in found.sizes} == {"root"}


def test_what_is_updated_early_has_room_within_the_budget_in_the_order_of_backward(planned: Planned) -> None:
    assert planned(**HOST, overlap="backward").sizes["undo root"] == 12 * ROOT
    assert planned(**HOST, overlap="backward", undo_bytes=12 * ROOT).named("undo") == ["undo root"]
    early = {**DISK, "stage": 3, "layers": MANY, "overlap": "backward"}
    every = planned(**early)
    assert len(every.named("spare")) == 2 * (MANY + 1)
    assert not every.named("undo")
    assert planned(**early, undo_bytes=12 * ROOT).named("spare") == ["spare master root", "spare moments root"]


def test_units_on_disk_take_turns_in_host_memory(planned: Planned) -> None:
    """Six units and two turns, for the one in use and one ahead of it; everything once on disk."""
    found = planned(**DISK, stage=3, layers=MANY, growth=1, prefetch_units=1)
    units = {f"layers.{index}": LAYER * (1 + index) for index in range(MANY)} | {"root": ROOT}
    each = {"master": 4, "moments": 8, "grad": 2, "work": 2, "param": 2}
    turns = [max([*units.values()][turn::2]) for turn in range(2)]
    want = {f"{kind} turn {turn}": count * most for kind, count in each.items() for turn, most in enumerate(turns)}
    stored = {kind: count for kind, count in each.items() if kind != "work"}
    want |= {f"disk {kind} {unit}": count * units[unit] for kind, count in stored.items() for unit in units}
    frozen = {"frozen turn 1": 2 * 8 * 32, "disk frozen root": 2 * 8 * 32}
    assert found.sizes == want | frozen


def test_what_is_loaded_is_what_is_spilled(planned: Planned) -> None:
    for changes in ({}, {"overlap": "backward"}, {"param": "device", "grad": "host"}):
        found = planned(**DISK | changes, stage=3, layers=2)
        for unit in ("layers.0", "layers.1", "root"):
            loaded = found.slots_of[f"LOAD states {unit}"]
            assert loaded == found.slots_of[f"SPILL states {unit}"]
            update = found.slots_of[f"COMPUTE update {unit}"]
            assert {slot for slot in loaded if not slot.startswith("disk")} <= update


def test_fp32_parameters_on_disk_are_their_masters(planned: Planned) -> None:
    found = planned(**DISK, stage=3, precision={"param": "fp32"})
    assert not found.named("disk param")
    assert "disk master root" in found.slots_of["LOAD param root"]
    assert "SPILL work root" not in found.slots_of
