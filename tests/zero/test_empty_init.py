"""Modules constructed by `empty_init` have the values of plain ones, to the bit, and few bytes at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch
from live_tensors import live_bytes
from pool import Pool
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from training_loops import snapshot

import dzero

MIN_BYTES = 1 << 16
"""Smaller parameters keep their values."""
WIDTH = 160  # a square matrix of it is larger
LARGE = 4 * WIDTH * WIDTH


class Block(nn.Module):
    """Layers with initializers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        nn.init.orthogonal_(self.down.weight, gain=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """A net whose constructor does what constructors do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH * 2, WIDTH, padding_idx=3)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(WIDTH, WIDTH * 2, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.linspace(0, 1, WIDTH * WIDTH).view(WIDTH, WIDTH).exp_())
        self.register_buffer("table", torch.randn(WIDTH, WIDTH))
        self.apply(self._init)
        with torch.no_grad():
            self.blocks[0].up.weight.mul_(0.5)  # read after others were made
            self.blocks[1].up.weight[: WIDTH // 2] = self.blocks[2].up.weight[WIDTH // 2 :]
            self.blocks[3].down.weight.copy_(self.blocks[2].down.weight.t())
            self.blocks[2].up.weight.add_(self.blocks[0].up.weight.mean().item())

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0.0, 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) @ self.scale.to(self.embed.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.table[0].to(x.dtype))


class Odd(nn.Module):
    """What an operator log alone would lose: other generators, NumPy, addresses, casts, and views."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.drawn = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator))
        self.outside = nn.Parameter(torch.from_numpy(np.ones((WIDTH, WIDTH), np.float32)) * 3)
        self.seen = nn.Parameter(torch.rand(WIDTH, WIDTH))
        address = self.seen.detach().numpy()
        self.cast = nn.Linear(WIDTH, 4 * WIDTH, dtype=torch.float64).half()
        self.part = nn.Parameter(torch.rand(2 * WIDTH, WIDTH)[WIDTH:])
        self.rows = nn.Parameter(torch.empty(2 * WIDTH, WIDTH))
        with torch.no_grad():
            for row in self.rows:
                row.normal_()
        address[0] = 7.0
        self.alias = self.drawn.detach()
        self.first = nn.Parameter(torch.ones(WIDTH, WIDTH))
        second = self.first
        for _ in range(40):  # a replay that takes as many calls as there are rabbits
            self.first, second = nn.Parameter((self.first + second).detach()), self.first


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "net": Net,
    "odd": Odd,
    "deep copies": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, WIDTH, batch_first=True), 3),
    "parameters of parameters": lambda: nn.Sequential(
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    ),
    "lstm": lambda: nn.LSTM(WIDTH, WIDTH, dtype=torch.float64),
}


@pytest.mark.filterwarnings("ignore:empty_init")
@pytest.mark.parametrize("name", BUILDERS)
def test_values_and_generators_are_those_of_plain_construction(name: str) -> None:
    torch.manual_seed(1)
    plain, after = BUILDERS[name](), torch.rand(1)
    torch.manual_seed(1)
    with dzero.empty_init(live_bytes=0) as init:
        model = BUILDERS[name]()
    assert torch.equal(torch.rand(1), after)
    before = torch.get_rng_state()
    init.fill(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [*model.state_dict()] == [*plain.state_dict()]
    for (key, found), expected in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        assert found.dtype == expected.dtype, key
        assert torch.equal(found, expected), key
    ties = [[p is q for q in model.parameters()] for p in model.parameters()]
    assert ties == [[p is q for q in plain.parameters()] for p in plain.parameters()]


def test_large_parameters_are_on_meta_and_what_cannot_be_made_again_is_not() -> None:
    with (
        pytest.warns(UserWarning, match="empty_init: parameters of 0.00 GiB keep their values"),
        dzero.empty_init(live_bytes=0),
    ):
        model, net = Odd(), Net()
    kept = {name for name, param in model.named_parameters() if not param.is_meta}
    assert kept == {"outside", "seen", "rows", "first", "cast.bias"}
    assert {name for name, param in net.named_parameters() if not param.is_meta} == {
        name for name, param in net.named_parameters() if param.nbytes < MIN_BYTES
    }
    assert not net.table.is_meta
    torch.manual_seed(5)
    assert torch.equal(model.alias, torch.randn(WIDTH, WIDTH))  # somebody still has these values


def test_few_bytes_exist_at_a_time() -> None:
    gc.collect()
    before, held = live_bytes(), []

    class Counted(Net):
        def _init(self, module: nn.Module) -> None:
            super()._init(module)
            with torch._C.DisableTorchFunction():  # so that looking at a storage does not keep it
                held.append(live_bytes() - before)

    with dzero.empty_init(live_bytes=LARGE) as init:
        model = Counted()
    whole = sum(param.nbytes for param in model.parameters())
    small = sum(param.nbytes for param in model.parameters() if not param.is_meta) + model.table.nbytes
    gc.collect()
    left = live_bytes() - before
    assert small <= left < small + LARGE  # states of generators
    assert max(held) <= small + 5 * LARGE < whole
    init.fill(model.blocks[0])
    assert live_bytes() - before == left + 2 * LARGE


def sharded_values(rank: int, ranks: int, stage: int, empty: bool) -> tuple[dict[str, Tensor], int, int]:
    """Full parameters of a net, seeded differently on each rank, and most bytes while it is sharded."""
    torch.manual_seed(rank)
    gc.collect()
    before, held = live_bytes(), [0]
    if empty:
        with dzero.empty_init(live_bytes=0) as init:
            model = Net()
        fill = init.fill

        def counted(module: nn.Module) -> None:
            fill(module)
            held.append(live_bytes() - before)

        init.fill = counted  # type: ignore[method-assign]
        sharded = dzero.shard(model, stage, precision="fp32", init=init)
    else:
        model = Net()
        sharded = dzero.shard(model, stage, precision="fp32")
    units = [sum(param.elems for param in unit.params) * 4 for unit in sharded.shapes]
    optim = dzero.AdamW(sharded, lr=1e-2)
    for _ in range(2):
        sharded.model(torch.arange(8) + rank).square().mean().backward()
        optim.step()
    return snapshot(sharded, optim), max(held), sum(units) // ranks + max(units) + model.table.nbytes


@pytest.mark.parametrize("stage", [0, 3])
def test_shards_are_those_of_rank_0_as_from_a_plain_model(pool: Pool, stage: int) -> None:
    plain, found = (pool.run(sharded_values, 2, stage, empty) for empty in (False, True))
    for (expected, _, _), (values, held, bound) in zip(plain, found, strict=True):
        assert all(torch.equal(values[name], expected[name]) for name in expected)
        if stage == 3:
            assert held <= bound * 1.1
