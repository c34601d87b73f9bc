"""Units that are larger than zero.unit_bytes have parts: which, with what bits, and what else gets smaller."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import small_decoders
import torch
from pool import Pool
from torch import nn
from training_loops import sharded_net, train

from dzero import AdamW, DiskConfig, OffloadConfig, PrecisionConfig, ZeroConfig, make_mesh, shard
from dzero.offload.buffer_layout import BufferLayout
from dzero.zero.config import PRECISIONS
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import ParamShape, UnitShape
from dzero.zero.units import UnitChoice, find_units, nested

STEPS = 3
BLOCK = ["norm1", "qkv", "out", "norm2", "up", "down"]  # 64, 3072, 1056, 64, 2112 and 2080 elements


def parts(model: nn.Module, most_elems: int) -> list[str]:
    """The units of the first block."""
    names = [name for name, _ in find_units(model, UnitChoice(most_elems=most_elems))]
    return [name.removeprefix("layers.0.") for name in names if name.startswith("layers.0")]


class Mixed(nn.Module):
    """A block of what is divided, and of what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleDict({"attention": nn.MultiheadAttention(8, 2)})
        self.attention = nn.MultiheadAttention(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.list = nn.ParameterList([torch.ones(99)])
        self.choosing = Choosing()
        self.path = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.tied, self.own = nn.Linear(8, 8), nn.Linear(8, 8)
        self.path[1].weight = self.tied.weight
        self.uses, self.too = (nn.Sequential(nn.Linear(4, 4)) for _ in range(2))
        self.too[0] = self.uses[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self.own(x)
        return own


class Choosing(nn.Module):
    """Data decide which of its elements runs."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best: torch.Tensor = self.experts[int(self.router(x).mean(0).argmax())](x)
        return best


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (8448, ["layers.0"]),
        (8447, ["qkv", "layers.0"]),
        (5000, ["qkv", "up", "layers.0"]),
        (1500, ["qkv", "up", "down", "layers.0"]),
        (1, ["norm1", "qkv", "out", "up", "down", "layers.0"]),
    ],
)
def test_the_largest_modules_become_parts_until_the_rest_is_small_enough(most: int, expected: list[str]) -> None:
    """Without the last module the block would have no parameters, so that it keeps one."""
    assert parts(small_decoders.build("even"), most) == expected


def test_parts_of_parts_are_found_and_what_may_not_be_called_is_not_divided() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([Mixed()])})
    found = parts(model, 1)
    assert found == ["choosing", "path.0", "own", "uses.0", "layers.0"]
    assert [name for name, _ in find_units(nn.Sequential(nn.MultiheadAttention(8, 2)), UnitChoice(most_elems=1))] == [
        "0"
    ]


def test_units_inside_others_are_told_by_their_names() -> None:
    names = ["layers.1.up", "layers.1", "layers.10", "layers.2+layers.3", "layers.3.x", "root"]
    assert nested(names) == {"layers.1.up": "layers.1", "layers.3.x": "layers.2+layers.3"}


CASES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 2, "microbatches": 2},
    {"stage": 3, "microbatches": 2, "param": "bf16"},
    {"stage": 3, "param": "fp32", "gather": "int8", "reduce": "int8"},
    {"stage": 1, "master": "remainder", "moments": "int8"},
]


def losses_and_values(rank: int, ranks: int, case: dict[str, Any], net: str, offload: OffloadConfig | None) -> Any:
    """Of a run in whole units, and of one in parts."""
    found = []
    for unit_bytes in (None, 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            sharded = sharded_net(net, unit_bytes=unit_bytes, offload=offload, **case)
        optim = AdamW(sharded, lr=1e-2)
        losses = train(sharded, optim, net, steps=STEPS)
        optim.synchronize()
        values = {name: whole(param) for name, param in sharded.model.named_parameters()}
        found.append((losses, values, len(sharded.units)))
    return found


def whole(param: torch.Tensor) -> torch.Tensor:
    """On every rank."""
    full = getattr(param, "full_tensor", None)
    return (param if full is None else full()).detach().clone()


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("net", ["uneven", "frozen"])
def test_a_run_in_parts_has_the_bits_of_one_in_whole_units(pool: Pool, case: dict[str, Any], net: str) -> None:
    for before, after in pool.run(losses_and_values, 2, case, net, None):
        check_same(before, after)


def test_so_it_has_with_states_on_disk(pool: Pool, tmp_path: Path) -> None:
    offload = OffloadConfig(grad="disk", master="disk", moments="disk", disk=DiskConfig(paths=[str(tmp_path)]))
    for before, after in pool.run(losses_and_values, 2, {"stage": 3, "microbatches": 2}, "even", offload):
        check_same(before, after)


def check_same(before: Any, after: Any) -> None:
    (losses, values, units), (again, others, more) = before, after
    assert more > units
    assert losses == again
    assert values.keys() == others.keys()
    assert all(torch.equal(value, others[name]) for name, value in values.items())


def test_a_block_that_is_used_at_two_places_has_parts() -> None:
    model = small_decoders.build("even")
    model.layers[2] = model.layers[0]
    assert parts(model, 5000) == ["qkv", "up", "layers.0"]


@pytest.mark.parametrize("prefetch_units", [1, 2, 5])
def test_host_slots_of_states_on_disk_are_as_many_as_turns_and_as_large_as_the_largest_part(
    prefetch_units: int,
) -> None:
    """fp32 masters and moments, and bf16 working copies: 14 bytes per element."""
    units = [
        UnitShape(f"layers.{block}.{part}", (ParamShape(f"layers.{block}.{part}.weight", (64, 64), True),))
        for block in range(4)
        for part in "abc"
    ]
    offload = OffloadConfig(grad="host", master="disk", moments="disk", prefetch_units=prefetch_units)
    layout = Layout.of(ZeroConfig(stage=2), PRECISIONS["bf16"], offload, replicate=1, shard=2)
    slots = [slot for slot in BufferLayout(layout, units).slots() if "turn" in slot.name]
    assert sum(slot.count for slot in slots) == (1 + prefetch_units) * 14 * 64 * 64 // 2


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
        self.scales, self.router, self.norm = Scaled(), Router(), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.linspace(0.1, 1.1, 8, dtype=torch.float32)
        return x + self.scales(table, self.norm(x)) + self.router(x.float()).to(x.dtype)


class Scaled(nn.Linear):
    """A layer whose first argument is a table of scales in fp32."""

    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return (super().forward(x).float() * scales).to(x.dtype)


class Router(nn.Linear):
    """A layer that multiplies in fp32."""

    def __init__(self) -> None:
        super().__init__(8, 8)

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
    for whole, parted in pool.run(outputs, 2):
        assert torch.equal(whole, parted)
