"""Parts of units that are larger than zero.unit_bytes: with what bits they train, and what else gets smaller."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from fake_ranks import fake_ranks
from parity_cells import whole
from pool import Pool
from torch import nn
from training_loops import sharded_net, train

from dzero import AdamW, DiskConfig, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard, testing

STEPS = 2
FEW: list[dict[str, Any]] = [
    {"net": "frozen", "stage": 3, "microbatches": 2, "param": "bf16"},
]
OTHERS: list[dict[str, Any]] = [
    {"net": "uneven", "stage": 2, "microbatches": 2},
    {"stage": 0},
    {"stage": 1, "master": "remainder", "moments": "int8"},
    {"stage": 3, "param": "fp32", "gather": "int8", "reduce": "int8"},
    {"net": "frozen", "stage": 2, "microbatches": 2},
    {"stage": 3, "microbatches": 2, "param": "bf16"},
]


def differences(rank: int, ranks: int, cases: list[dict[str, Any]], folder: str) -> list[str]:
    """What differs between a run in whole units and one in parts."""
    wrong = []
    for case in cases:
        settings = dict(case)
        net = settings.pop("net", "uneven")
        if settings.pop("on_disk", False):
            on_disk = dict.fromkeys(("grad", "master", "moments"), "disk")
            settings["offload"] = OffloadConfig(**on_disk, disk=DiskConfig(paths=[folder]))
        found = []
        for unit_bytes in (None, 1):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                sharded = sharded_net(net, unit_bytes=unit_bytes, **settings)
            optim = AdamW(sharded, lr=1e-2)
            losses = train(sharded, optim, net, steps=STEPS)
            optim.synchronize()
            values = {name: whole(param) for name, param in sharded.model.named_parameters()}
            found.append((losses, values, len(sharded.units)))
        (losses, values, units), (again, others, more) = found
        wrong += [] if more > units and losses == again else [str(case)]
        wrong += [f"{name}: {case}" for name, value in values.items() if not torch.equal(value, others[name])]
    return wrong


def test_a_run_in_parts_has_the_bits_of_one_in_whole_units(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(differences, 2, FEW, str(tmp_path)) == [[], []]


@pytest.mark.full("tests/zero/test_unit_parts.py::test_a_run_in_parts_has_the_bits_of_one_in_whole_units")
def test_so_it_has_in_every_format_and_with_states_on_disk(pool: Pool, tmp_path: Path) -> None:
    on_disk = {"net": "even", "stage": 3, "microbatches": 2, "on_disk": True}
    assert pool.run(differences, 2, [*OTHERS, on_disk], str(tmp_path)) == [[], []]


class Three(nn.Module):
    """A block of three equal matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.c(self.b(self.a(x)))
        return out


@pytest.mark.parametrize("prefetch_units", [1, 5])
def test_host_slots_of_states_on_disk_are_as_many_as_turns_and_as_large_as_a_part(
    tmp_path: Path, prefetch_units: int
) -> None:
    """fp32 masters and moments, and bf16 working copies of half of 64 x 64 elements: 8, 16 and 4 KiB."""
    disk = DiskConfig(paths=[str(tmp_path)])
    offload = OffloadConfig(grad="host", master="disk", moments="disk", disk=disk, prefetch_units=prefetch_units)
    with fake_ranks(2):
        zero = ZeroConfig(stage=2, unit_bytes=2 * 64 * 64)
        sharded = shard(nn.Sequential(*(Three() for _ in range(4))), zero, precision="bf16", offload=offload)
        slots = [line.split() for line in testing.schedule(AdamW(sharded)) if line.startswith("slot ")]
    sizes = sorted((kind, size, unit) for _, kind, *where, size, unit in slots if where[0] == "turn")
    turns = 1 + prefetch_units
    of_kind = {"master": "8.00", "moments": "16.0", "work": "4.00"}
    assert sizes == [(kind, size, "KiB") for kind, size in of_kind.items() for _ in range(turns)]


def larger(rank: int, ranks: int) -> list[str]:
    """What is said of a limit that cannot be met."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        zero = ZeroConfig(stage=3, unit_bytes=4096)
        shard(small_decoders.build("even"), zero, precision=PrecisionConfig(), mesh=make_mesh("cpu"))
    return [str(each.message) for each in told if "unit_bytes" in str(each.message)]


def test_a_limit_that_is_not_met_is_told_once_with_the_largest_unit(pool: Pool) -> None:
    first, other = pool.run(larger, 2)
    assert not other
    (message,) = first
    assert message.startswith("zero.unit_bytes=4096 (4.00 KiB): 10 of 13 units stay larger, most of all root with")


class Reads(nn.Module):
    """Reads the weight of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.own(self.norm(x)), self.other.weight)


def read_outside(rank: int, ranks: int) -> str:
    """The error of a part whose weight is read without calling it."""
    model = nn.Sequential(Reads(), Reads())
    sharded = shard(model, ZeroConfig(stage=3, unit_bytes=1), precision="fp32")
    with pytest.raises(RuntimeError) as found:
        sharded.model(torch.ones(2, 8))
    return str(found.value)


@pytest.mark.filterwarnings("ignore:zero.unit_bytes")
def test_a_weight_that_is_read_without_calling_its_module_is_told_with_its_line(pool: Pool) -> None:
    for message in pool.run(read_outside, 2):
        place, _, rest = message.partition(" uses a parameter outside")
        assert place.startswith(__file__)
        assert "zero.unit_bytes" in rest


class Casts(nn.Module):
    """Computes in fp32 on purpose, with a layer that gets a table first, and one that turns to fp32 by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scales, self.router, self.norm = Scaled(8, 8), Router(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(0.1, 1.1, 8, dtype=torch.float32)
        return x + self.scales(table, self.norm(x)) + self.router(x.float()).to(x.dtype)


class Scaled(nn.Linear):
    """A layer whose first argument is a table of scales in fp32."""

    def forward(self, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (super().forward(x).float() * scales).to(x.dtype)


class Router(nn.Linear):
    """A layer that multiplies in fp32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.float()


def outputs(rank: int, ranks: int) -> list[torch.Tensor]:
    """Of a model in bf16, in whole units and in parts."""
    found = []
    for unit_bytes in (None, 1):
        torch.manual_seed(0)
        sharded = shard(nn.Sequential(Casts(), Casts()), ZeroConfig(stage=3, unit_bytes=unit_bytes), precision="bf16")
        found.append(sharded.model(torch.linspace(-1, 1, 24).view(3, 8)).detach())
    return found


@pytest.mark.filterwarnings("ignore:zero.unit_bytes")
def test_what_a_block_gives_its_parts_keeps_its_dtype(pool: Pool) -> None:
    for unparted, parted in pool.run(outputs, 2):
        assert torch.equal(unparted, parted)
