"""Writes into parameters and gradients, draws and losses of them: what they are in torch, or one clear line."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_of_torch import whole
from pool import Pool
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from dzero import AdamW, shard

TIERS = [(3, "host_all"), (3, None), (0, None), (1, None), (2, None)]
LOST = "would be lost"


def said_by(run: Any) -> str:
    try:
        run()
    except RuntimeError as error:
        return str(error)
    return ""


class Writes(nn.Module):
    """Writes into its weight when it is called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5)), how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "clamp":
                self.weight.clamp_(-0.5, 0.5)
            if self.how == "to itself":
                self.weight.mul_(1.0)
            if self.how == "negated":  # the bits together are as they were, in another order
                self.weight.neg_()
            if self.how == "from data":
                self.weight.data.copy_(self.weight.data - x.mean())
            if self.how == "set":
                self.weight.data = self.weight.data * 0.9
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
    for how in HOWS:
        sharded = shard(writing(how), stage, precision="fp32", offload=offload)
        optim, found = AdamW(sharded, lr=0.1, weight_decay=0.0), list[Tensor]()
        said = said_by(lambda: found.extend(step_of(sharded.model, optim) for _ in range(2)))  # noqa: B023
        ends[how] = said or found[-1]
    return ends


HOWS = ("clamp", "to itself", "negated", "from data", "set", "norm")


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("stage", "offload"), TIERS)
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


def rows() -> dict[str, Any]:
    """Writes into parts of a tensor [8, 6]."""

    def assign(tensor: Tensor) -> None:
        tensor[:3] = 0

    return {
        "row": lambda tensor: tensor[5].zero_(),
        "slice": lambda tensor: tensor[:3].mul_(0.5),
        "set": assign,
        "data": lambda tensor: tensor.data[2:4].fill_(1),
        "flat": lambda tensor: tensor.view(-1)[3:9].fill_(1),
        "chunk": lambda tensor: tensor.chunk(4)[1].zero_(),
        "split": lambda tensor: tensor.split([3, 5])[1].neg_(),
        "diagonal": lambda tensor: tensor.diagonal().fill_(1),
        "init": lambda tensor: nn.init.ones_(tensor[:2]),
    }


def through_the_whole(tensor: Tensor, write: Any) -> None:
    """The repair that the error names."""
    full = whole(tensor).clone()
    write(full)
    tensor.copy_(
        distribute_tensor(full, tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else full
    )


def written_rows(rank: int, ranks: int, stage: int, offload: str | None) -> list[dict[str, tuple[str, bool]]]:
    return [written_rows_of(stage, offload, of_grad) for of_grad in (False, True)]


def written_rows_of(stage: int, offload: str | None, of_grad: bool) -> dict[str, tuple[str, bool]]:
    """What each write said, and whether its values, or those of the repair, are torch's."""
    torch.manual_seed(0)
    sharded = shard(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2)), stage, precision="fp32", offload=offload)
    optim = AdamW(sharded)
    sharded.model(torch.ones(2, 6)).sum().backward()
    tensor: Any = sharded.model.get_parameter("0.weight")
    tensor = tensor.grad if of_grad else tensor
    found = {}
    for name, write in rows().items():
        expected = whole(tensor.detach()).clone()
        before = expected.clone()
        write(expected)
        with torch.no_grad():
            said = said_by(lambda: write(tensor))  # noqa: B023
            assert not said or torch.equal(whole(tensor.detach()), before)
            if said:
                through_the_whole(tensor, write)
        found[name] = said, torch.equal(whole(tensor.detach()), expected)
    assert torch.equal(whole(tensor.detach()[:3]), whole(tensor.detach())[:3])  # they can be read
    optim.step()
    return found


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("stage", "offload"), TIERS)
def test_a_write_into_rows_of_a_sharded_tensor_is_refused(pool: Pool, stage: int, offload: str | None) -> None:
    """Of a parameter, and of its gradient."""
    for of_both in pool.run(written_rows, 2, stage, offload):
        for name, (said, right) in (item for found in of_both for item in found.items()):
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


def drawn(rank: int, ranks: int, stage: int, offload: str | None) -> dict[str, Tensor]:
    sharded = shard(nn.Sequential(nn.Linear(6, 9, bias=False)), stage, precision="fp32", offload=offload)
    return draw(sharded.model)


def draw(model: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, fill in DRAWS.items():
        weight = model.get_parameter("0.weight")
        with torch.no_grad():
            weight.zero_()
            torch.manual_seed(1)
            fill(weight)
        found[name] = whole(weight.detach()).clone()
    return found


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("stage", "offload"), TIERS)
def test_values_drawn_after_sharding_are_those_of_one_process(pool: Pool, stage: int, offload: str | None) -> None:
    """DTensor by itself draws the same rows on every rank of a CPU."""
    expected = draw(nn.Sequential(nn.Linear(6, 9, bias=False)))
    for found in pool.run(drawn, 2, stage, offload):
        for name, value in expected.items():
            assert torch.equal(found[name], value), name


LOSSES: dict[str, Any] = {
    "mse": F.mse_loss,
    "smooth": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "sum": lambda a, b: F.mse_loss(a, b, reduction="sum"),
    "none": lambda a, b: F.mse_loss(a, b, reduction="none").sum(),
    "by hand": lambda a, b: (a - b).square().mean(),
    "norm": lambda a, b: 0.1 * a.norm() + (a * b).sum(),
}


def regularized(rank: int, ranks: int, stage: int, offload: str | None) -> list[dict[str, Tensor]]:
    """Losses are added as they are, and made whole before."""
    torch.manual_seed(0)
    sharded = shard(nn.Sequential(nn.Linear(6, 9, bias=False)), stage, precision="fp32", offload=offload)
    optim = AdamW(sharded)
    return [grads_of_losses(sharded.model, optim, made_whole=made_whole) for made_whole in (False, True)]


def grads_of_losses(model: nn.Module, optim: Any, *, made_whole: bool = False) -> dict[str, Tensor]:
    """Gradients of losses of a weight and its anchor, as of L2-SP and EWC."""
    found = {}
    for name, loss in LOSSES.items():
        optim.zero_grad()
        weight = model.get_parameter("0.weight")
        penalty = loss(weight, weight.detach() * 0.5)
        (model(torch.ones(2, 6)).sum() + (whole(penalty) if made_whole else penalty)).backward()
        found[name] = whole(weight.grad).clone()
    return found


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("stage", "offload"), TIERS)
def test_a_loss_of_a_weight_has_the_gradient_of_the_whole(pool: Pool, stage: int, offload: str | None) -> None:
    """DTensor divides the gradient of a mean by the elements of this rank's part, and cannot be added to a loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 9, bias=False))
    expected = grads_of_losses(model, torch.optim.SGD(model.parameters()))
    for found, name in itertools.product(itertools.chain(*pool.run(regularized, 2, stage, offload)), expected):
        torch.testing.assert_close(found[name], expected[name], msg=name)
