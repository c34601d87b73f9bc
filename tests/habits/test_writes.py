"""Writes into parameters in forward and into rows of gradients, and draws: what they are in torch, or one clear line.

Other expressions on weights, losses among them, are those of docs/reference/expressions.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from many_cells import of_all
from models_of_torch import said_by, whole
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dzero import AdamW, shard

on_tiers = pytest.mark.parametrize(("stage", "offload"), [(3, "host_all"), (3, None), (0, None), (1, None), (2, None)])
LOST = "would be lost"
WRITES: dict[str, Any] = {
    "clamp": lambda weight, x: weight.clamp_(-0.5, 0.5),
    "to itself": lambda weight, x: weight.mul_(1.0),
    "negated": lambda weight, x: weight.neg_(),  # the bits together are as they were, in another order
    "from data": lambda weight, x: weight.data.copy_(weight.data - x.mean()),
    "set": lambda weight, x: setattr(weight, "data", weight.data * 0.9),
    "norm": lambda weight, x: None,  # the embedding before it writes
}


class Writes(nn.Module):
    """Writes into its weight when it is called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5)), how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            WRITES[self.how](self.weight, x)
        return x @ self.weight.t() @ self.weight


def writing(how: str) -> nn.Module:
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 5, max_norm=0.5 if how == "norm" else None)
    return nn.Sequential(embedding, Writes(how), nn.Linear(5, 3))


def step_of(model: nn.Module, optim: Any) -> Tensor:
    optim.zero_grad()
    model(torch.arange(6)).square().mean().backward()
    optim.step()
    return whole(next(p for p in model.parameters()).detach()).clone()


def written_in_forward(rank: int, ranks: int, stage: int, offload: str | None) -> dict[str, Tensor | str]:
    """By how: the first parameter after two steps, or what was said."""
    ends: dict[str, Tensor | str] = {}
    for how in WRITES:
        sharded = shard(writing(how), stage, precision="fp32", offload=offload)
        optim, found = AdamW(sharded, lr=0.1, weight_decay=0.0), list[Tensor]()
        said = said_by(lambda: found.extend(step_of(sharded.model, optim) for _ in range(2)))  # noqa: B023
        ends[how] = said or found[-1]
    return ends


@pytest.mark.product(keep=2)
@on_tiers
def test_a_write_into_a_gathered_copy_in_forward_is_refused(pool: Pool, stage: int, offload: str | None) -> None:
    for ends in pool.run(written_in_forward, 2, stage, offload):
        for how, found in ends.items():
            if how == "to itself" or (stage == 0 and how != "set"):
                model = writing(how)
                optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
                torch.testing.assert_close(found, [step_of(model, optim) for _ in range(2)][-1])
            else:
                assert isinstance(found, str)
                assert LOST in found
                assert ("0.weight" if how == "norm" else "1.weight") in found


def assign(tensor: Tensor) -> None:
    tensor[:3] = 0


ROWS: dict[str, Any] = {
    "row": lambda tensor: tensor[5].zero_(),
    "set": assign,
    "data": lambda tensor: tensor.data[2:4].fill_(1),
    "flat": lambda tensor: tensor.view(-1)[3:9].fill_(1),
    "slice": lambda tensor: tensor[:3].mul_(0.5),
    "chunk": lambda tensor: tensor.chunk(4)[1].zero_(),
    "split": lambda tensor: tensor.split([3, 5])[1].neg_(),
    "diagonal": lambda tensor: tensor.diagonal().fill_(1),
    "init": lambda tensor: nn.init.ones_(tensor[:2]),
}
"""Writes into parts of a tensor [8, 6]."""


def through_the_whole(tensor: Tensor, write: Any) -> None:
    """The repair that the error names."""
    full = whole(tensor).clone()
    write(full)
    tensor.copy_(
        distribute_tensor(full, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else full
    )


def written_rows(rank: int, ranks: int, stage: int, offload: str | None, of_grad: bool) -> dict[str, tuple[str, bool]]:
    """What each write said, and whether its values, or those of the repair, are torch's."""
    torch.manual_seed(0)
    sharded = shard(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), stage, precision="fp32", offload=offload)
    optim = AdamW(sharded)
    sharded.model(torch.ones(2, 6)).sum().backward()
    tensor: Any = sharded.model.get_parameter("0.weight")
    tensor = tensor.grad if of_grad else tensor
    found = {}
    for name, write in ROWS.items():
        before = whole(tensor.detach()).clone()
        expected = before.clone()
        write(expected)
        with torch.no_grad():
            said = said_by(lambda: write(tensor))  # noqa: B023
            if said:
                assert torch.equal(whole(tensor.detach()), before)
                through_the_whole(tensor, write)
        found[name] = said, torch.equal(whole(tensor.detach()), expected)
    assert torch.equal(whole(tensor.detach()[:3]), whole(tensor.detach())[:3])  # they can be read
    optim.step()
    return found


@pytest.mark.product(keep=2)
@on_tiers
def test_a_write_into_rows_of_a_sharded_tensor_is_refused(pool: Pool, stage: int, offload: str | None) -> None:
    """Of a parameter, and of its gradient."""
    for found in of_all(pool, 2, written_rows, [(stage, offload, of_grad) for of_grad in (False, True)]):
        for name, (said, right) in found.items():
            assert right, name
            assert (LOST in said) is (stage > 0), name


DRAWS: dict[str, Any] = {
    "normal": nn.init.normal_,
    "uniform": lambda weight: weight.uniform_(-1, 1),
    "xavier": nn.init.xavier_uniform_,
    "kaiming": nn.init.kaiming_normal_,
    "truncated": nn.init.trunc_normal_,
    "noise": lambda weight: weight.add_(torch.randn_like(weight) + torch.rand_like(weight)),
}


def one_layer() -> nn.Module:
    return nn.Linear(6, 9, bias=False)


def draw(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, fill in DRAWS.items():
        weight = model.get_parameter("weight")
        with torch.no_grad():
            weight.zero_()
            torch.manual_seed(1)
            fill(weight)
        found[name] = whole(weight.detach()).clone()
    return found


def drawn(rank: int, ranks: int, stage: int, offload: str | None) -> dict[str, Tensor]:
    return draw(shard(one_layer(), stage, precision="fp32", offload=offload).model)


@pytest.mark.product(keep=1)
@on_tiers
def test_values_drawn_after_sharding_are_those_of_one_process(pool: Pool, stage: int, offload: str | None) -> None:
    """DTensor by itself draws the same rows on every rank of a CPU."""
    expected = draw(one_layer())
    for found in pool.run(drawn, 2, stage, offload):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name
