"""What a model has before `shard`, or returns from its parts, trains as in plain torch, at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models_of_torch import whole
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import dzero
from dzero import DiskConfig, TorchOptimizer, ZeroConfig, shard

MASK = (torch.arange(16) >= 8).float().view(-1, 1)


def masked(weight: nn.Parameter) -> None:
    weight.grad.mul_(MASK)


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))


def train(model: Any, optim: torch.optim.Optimizer, rank: int = 0, ranks: int = 1) -> None:
    """Three steps on this rank's rows."""
    for _ in range(3):
        model(torch.arange(16).view(4, 4).chunk(ranks)[rank]).square().mean().backward()
        optim.step()
        optim.zero_grad()


def hooked(rank: int, ranks: int, stage: int, offload: str, kind: str) -> tuple[list[Tensor], bool, bool]:
    """Weights after training with a hook, whether rows that it kept have gradients without it, and an attribute."""
    model = net()
    weight = model[0].weight
    weight._no_weight_decay = True
    by_return = kind == "register_hook"
    handle = getattr(weight, kind)((lambda grad: grad * MASK) if by_return else masked)
    sharded = shard(model, ZeroConfig(stage=stage), precision="fp32", offload=offload)
    optim = TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)
    train(model, optim, rank, ranks)
    optim.synchronize()
    weights = [whole(param.detach()).clone() for param in model.parameters()]
    handle.remove()
    model(torch.arange(8).view(2, 4)).square().mean().backward()
    counts = bool(whole(model[0].weight.grad)[:8].any())
    optim.step()
    return weights, counts, model[0].weight._no_weight_decay


@pytest.mark.product(keep=3)
@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize(("stage", "offload"), [(0, "none"), (3, "host_all"), (1, "none"), (2, "host")])
def test_hooks_and_attributes_of_parameters_count_after_shard(pool: Pool, stage: int, offload: str, kind: str) -> None:
    """A hook sees this rank's whole gradient; once its handle is removed, rows that it kept have gradients again."""
    plain = net()
    plain[0].weight.register_hook(lambda grad: grad * MASK)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    assert torch.equal(plain[0].weight[:8], net()[0].weight[:8])
    for weights, counts, has_attribute in pool.run(hooked, 2, stage, offload, kind):
        for value, expected in zip(weights, plain.parameters(), strict=True):
            torch.testing.assert_close(value, expected.detach(), rtol=0, atol=1e-6)
        assert counts
        assert has_attribute


@on_ranks(1)
def test_a_hook_that_would_not_see_whole_gradients_is_refused(rank: int, ranks: int) -> None:
    """A hook that would miss earlier microbatches, and one that would see tiles."""
    model, layer = nn.Sequential(nn.Linear(4, 4)), nn.Linear(8, 8)
    model[0].weight.register_post_accumulate_grad_hook(masked)
    layer.weight.register_hook(lambda grad: grad)
    with pytest.raises(ValueError, match=r"^0\.weight has a hook.*take register_hook"):
        shard(model, 2, microbatches=2)
    with pytest.raises(ValueError, match=r"^weight of Linear has a hook of its own"):
        dzero.tile(layer, 2)


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
            param.mark = name

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        return self.head(x + self.scale * self.down(self.up(x).relu()))


def marks(rank: int, ranks: int, stage: int, how: str, path: str) -> dict[str, str | None]:
    model: Any = Marked()
    given: dict[str, Any] = {}
    if how == "tp":
        given["mesh"] = dzero.make_mesh("cpu", tp=2)
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        config = dzero.ParallelConfig(tensor_plan=plan, replicated=["embed.weight", "scale"])
        model = dzero.parallelize(model, given["mesh"], config)
    elif how == "tiles":
        dzero.tile(model.up, 2)
    elif how == "disk":
        tiers = dict.fromkeys(("param", "grad", "master", "moments"), "disk")
        given["offload"] = dzero.OffloadConfig(**tiers, disk=DiskConfig(paths=[path]))
    sharded = shard(model, stage, **given)
    return {name: getattr(param, "mark", None) for name, param in sharded.model.named_parameters()}


@pytest.mark.product(keep=4)
@pytest.mark.parametrize(
    ("stage", "how"), [(3, "tiles"), (0, ""), (3, "disk"), (1, ""), (3, "tp"), (2, ""), (3, ""), (1, "tp")]
)
def test_every_parameter_keeps_its_attributes(pool: Pool, tmp_path: Path, stage: int, how: str) -> None:
    for found in pool.run(marks, 2, stage, how, str(tmp_path)):
        tiles = {"up.tiles.0.weight": "up.weight", "up.tiles.1.weight": "up.weight"}
        tiles |= {"up.tiles.0.bias": "up.bias", "up.tiles.1.bias": "up.bias"}
        assert found == {name: tiles.get(name, name) for name in found}


class Hidden(nn.Sequential):
    """A model whose output is in what only it can look into."""

    def forward(self, words: Tensor) -> Any:
        out = super().forward(words)
        return lambda: out


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_unit_whose_gradients_nothing_reduced_is_told(rank: int, ranks: int, stage: int) -> None:
    model = Hidden(nn.Embedding(16, 8), nn.Linear(8, 4))
    sharded = shard(model, ZeroConfig(stage=stage, units=lambda _: False), precision="fp32")
    optim = TorchOptimizer(sharded, torch.optim.SGD, lr=0.1)
    sharded.model(torch.arange(16).view(4, 4))().sum().backward()
    with pytest.raises(RuntimeError, match=r"^unit root got gradients that were never reduced"):
        optim.step()
