"""Parts of units that are larger than zero.unit_bytes: with what bits they train, and what else gets smaller."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from fake_ranks import fake_ranks
from on_ranks import on_ranks
from pool import Pool
from torch import nn
from training_loops import params_of, sharded_net, train, unequal

from dzero import AdamW, DiskConfig, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard, testing

CELLS: list[dict[str, Any]] = [
    {"net": "frozen", "stage": 3, "microbatches": 2, "param": "bf16"},
    {"net": "uneven", "stage": 2, "microbatches": 2},
    {"net": "uneven", "stage": 0},
    {"net": "uneven", "stage": 1, "master": "remainder", "moments": "int8"},
    {"net": "uneven", "stage": 3, "param": "fp32", "gather": "int8", "reduce": "int8"},
    {"net": "even", "stage": 3, "microbatches": 2, "tier": "disk"},
]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("cell", CELLS, ids=str)
@on_ranks(2)
def test_a_run_in_parts_has_the_bits_of_one_in_whole_units(
    rank: int, ranks: int, tmp_path: Path, cell: dict[str, Any]
) -> list[str]:
    """What differs between a run in whole units and one in parts."""
    settings = dict(cell)
    net, tier = settings.pop("net"), settings.pop("tier", "device")
    disk = {"disk": DiskConfig(paths=[str(tmp_path)])} if tier == "disk" else {}
    offload, found = OffloadConfig(grad=tier, master=tier, moments=tier, **disk), []
    for unit_bytes in (None, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            sharded = sharded_net(net, unit_bytes=unit_bytes, offload=offload, **settings)
        optim = AdamW(sharded, lr=1e-2)
        losses = train(sharded, optim, net, steps=2)
        optim.synchronize()
        found.append((len(sharded.units), params_of(sharded) | {"losses": torch.tensor(losses)}))
    (units, whole), (more, parted) = found
    assert more > units
    return unequal(whole, parted)


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
    """Reads the weight of a layer that it does not call: its own, or that of another block."""

    def __init__(self, *others: nn.Linear) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.others = nn.LayerNorm(8), others

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.others or (self.other,))[0].weight
        return nn.functional.linear(self.own(self.norm(x)), weight)


def read_outside(rank: int, ranks: int) -> list[str]:
    """The error of a part whose weight is read without calling it, and that of another block's weight."""
    layer = nn.Linear(8, 8)
    nets = {1: [Reads(), Reads()], None: [Reads(layer), nn.Sequential(layer, nn.Linear(8, 8))]}
    found = []
    for unit_bytes, net in nets.items():
        sharded = shard(nn.Sequential(*net), ZeroConfig(stage=3, unit_bytes=unit_bytes), precision="fp32")
        with pytest.raises(RuntimeError) as error:
            sharded.model(torch.ones(2, 8))
        found.append(str(error.value))
    return found


def test_a_weight_that_is_read_without_calling_its_module_is_told_with_its_line(pool: Pool) -> None:
    for messages in pool.run(read_outside, 2):
        for message, advice in zip(messages, ("zero.unit_bytes", "(self.weight = other.weight)"), strict=True):
            place, _, rest = message.partition(" uses a parameter outside")
            assert place.startswith(__file__)
            assert advice in rest


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
