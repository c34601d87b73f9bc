"""What a model has before `shard`, or returns from its parts, trains as in plain torch, at every stage."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loops_of_torch import whole
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dzero
from dzero import DiskConfig, TorchOptimizer, ZeroConfig, shard

MASK = (torch.arange(16) >= 8).float().view(-1, 1)


def masked(weight: nn.Parameter) -> None:
    assert weight.grad is not None
    weight.grad.mul_(MASK)


def gap(model: nn.Module, stage: int, offload: str, inputs: list[Tensor], is_masked: bool = False) -> float:
    """How far training is from plain torch's on all ranks' rows, whose first weight has a masked gradient if asked."""
    plain = copy.deepcopy(model)
    if is_masked:
        plain[0].weight.register_hook(lambda grad: grad * MASK)  # type: ignore[index, operator, union-attr]
    sharded = shard(model, ZeroConfig(stage=stage), precision="fp32", offload=offload)
    optim = TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)
    own = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    for value in inputs:
        rows = value.chunk(ranks)[rank]
        for one, step, x in ((sharded.model, optim, rows), (plain, own, value)):
            out = one(x)
            (out if isinstance(out, Tensor) else out.x).square().mean().backward()
            step.step()
            step.zero_grad()
    optim.synchronize()
    pairs = zip(sharded.model.parameters(), plain.parameters(), strict=True)
    return max((whole(ours.detach()) - theirs.detach()).abs().max().item() for ours, theirs in pairs)


def hooked(rank: int, ranks: int, stage: int, offload: str, kind: str) -> tuple[float, bool, bool]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))
    weight = model[0].weight
    weight._no_weight_decay = True
    before = weight.detach().clone()
    handle = (
        weight.register_hook(lambda grad: grad * MASK)
        if kind == "register_hook"
        else weight.register_post_accumulate_grad_hook(masked)
    )
    far = gap(model, stage, offload, [torch.arange(16).view(4, 4) for _ in range(3)], is_masked=True)
    stays = torch.equal(whole(model[0].weight.detach())[:8], before[:8])
    handle.remove()
    rows = torch.arange(8).view(2, 4)
    model(rows).square().mean().backward()
    counts = bool(whole(model[0].weight.grad)[:8].any())
    return far, stays and counts, model[0].weight._no_weight_decay


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (1, "none"), (2, "host"), (3, "host_all")])
def test_hooks_and_attributes_of_parameters_count_after_shard(pool: Pool, stage: int, offload: str, kind: str) -> None:
    """A hook sees this rank's whole gradient; once its handle is removed, rows that it kept have gradients again."""
    for far, as_hooked, has_attribute in pool.run(hooked, 2, stage, offload, kind):
        assert far < 1e-6
        assert as_hooked
        assert has_attribute


def refused(rank: int, ranks: int) -> str:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight.register_post_accumulate_grad_hook(masked)
    with pytest.raises(ValueError, match="register_post_accumulate_grad_hook") as told:
        shard(model, 2, microbatches=2)
    return str(told.value)


def test_a_hook_that_would_miss_earlier_microbatches_is_refused(pool: Pool) -> None:
    for told in pool.run(refused, 2):
        assert told.startswith("0.weight has a hook")
        assert "take register_hook" in told


class Marked(nn.Module):
    """A model of all kinds of parameters, each with its own name as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.down.weight.requires_grad_(False)
        for name, param in self.named_parameters():
            param.mark = name  # type: ignore[attr-defined]

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        out: Tensor = self.head(x + self.scale * self.down(self.up(x).relu()))
        return out


def marks(rank: int, ranks: int, stage: int, how: str, path: str) -> dict[str, str | None]:
    model: Any = Marked()
    offload: Any = "none"
    mesh = dzero.make_mesh("cpu", replicate=ranks if stage == 0 else 1)
    if how == "tp":
        mesh = dzero.make_mesh("cpu", tp=2)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        config = dzero.ParallelConfig(tensor_plan=plan, replicated=["embed.weight", "scale"])
        model = dzero.parallelize(model, mesh, config)
    elif how == "tiles":
        dzero.tile(model.up, 2)
    elif how == "disk":
        offload = dzero.OffloadConfig(
            param="disk", grad="disk", master="disk", moments="disk", disk=DiskConfig(paths=[path])
        )
    sharded = shard(model, ZeroConfig(stage=stage), mesh=None if how == "tp" else mesh, offload=offload)
    return {name: getattr(param, "mark", None) for name, param in sharded.model.named_parameters()}


@pytest.mark.parametrize(
    ("stage", "how"), [(0, ""), (1, ""), (2, ""), (3, ""), (3, "disk"), (1, "tp"), (3, "tp"), (3, "tiles")]
)
def test_every_parameter_keeps_its_attributes(pool: Pool, tmp_path: Path, stage: int, how: str) -> None:
    for found in pool.run(marks, 2, stage, how, str(tmp_path)):
        tiles = {"up.tiles.0.weight": "up.weight", "up.tiles.1.weight": "up.weight"}
        tiles |= {"up.tiles.0.bias": "up.bias", "up.tiles.1.bias": "up.bias"}
        assert found == {name: tiles.get(name, name) for name in found}


def tiled_with_hook(rank: int, ranks: int) -> str:
    module = nn.Linear(8, 8)
    module.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match="hook") as told:
        dzero.tile(module, 2)
    return str(told.value)


def test_a_hook_that_would_see_tiles_is_refused(pool: Pool) -> None:
    (told,) = pool.run(tiled_with_hook, 1)
    assert told.startswith("weight of Linear has a hook of its own")


class Layer(nn.Module):
    """A unit that passes its output in an object. `how`: returned, in an own class with slots, or written in place."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 8)

    def forward(self, batch: Any) -> Any:
        out = torch.tanh(self.linear(batch.x))
        if self.how == "written":
            batch.x = out
            return None
        return SimpleNamespace(x=out) if self.how == "returned" else Slots(out)


class Slots:
    """An object without a dict."""

    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Objects(nn.Module):
    """A model whose units, and which itself, return objects."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(16, 8), nn.ModuleList(Layer(how) for _ in range(3))

    def forward(self, words: Tensor) -> Any:
        batch: Any = SimpleNamespace(x=self.embed(words))
        for layer in self.layers:
            returned = layer(batch)
            batch = batch if returned is None else returned
        return batch


def objects(rank: int, ranks: int, stage: int, how: str) -> float:
    torch.manual_seed(0)
    return gap(Objects(how), stage, "none", [torch.arange(16).view(4, 4) for _ in range(3)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_units_may_return_objects_that_pytree_does_not_know(pool: Pool, stage: int) -> None:
    for how in ("returned", "slots", "written"):
        assert max(pool.run(objects, 2, stage, how)) < 1e-6, how


class Hidden(Objects):
    """A model whose output is in what only it can look into."""

    def forward(self, words: Tensor) -> Any:
        out = super().forward(words)
        return lambda: out.x


def hidden(rank: int, ranks: int, stage: int) -> str:
    sharded = shard(Hidden("returned"), ZeroConfig(stage=stage, units=lambda _: False), precision="fp32")
    optim = TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)
    sharded.model(torch.arange(16).view(4, 4))().sum().backward()
    with pytest.raises(RuntimeError) as told:
        optim.step()
    return str(told.value)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_unit_whose_gradients_nothing_reduced_is_told(pool: Pool, stage: int) -> None:
    for told in pool.run(hidden, 2, stage):
        assert told.startswith("unit root got gradients that were never reduced")


class Tied(nn.Module):
    """Blocks that end in a Linear with a bias, whose output is a view; two of them share its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(nn.Sequential(nn.Tanh(), nn.Linear(8, 8)) for _ in range(3))
        self.layers[1][1].weight = self.layers[0][1].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def tied(rank: int, ranks: int, stage: int) -> float:
    torch.manual_seed(0)
    return gap(Tied(), stage, "none", [torch.randn(4, 3, 8) for _ in range(3)])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_that_blocks_share_train(pool: Pool, stage: int) -> None:
    assert max(pool.run(tied, 2, stage)) < 1e-6
