"""Derivatives that users take of a sharded model besides a loss's: right, or refused before FSDP2 keeps anything."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn
from torch.autograd import functional

import dzero

REFUSED: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: loss(model, x))(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(3, 1)),
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "hessian": lambda model, x: torch.func.hessian(lambda x: loss(model, x))(x),
    "per sample": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: loss(model, x)))(x),
}
RIGHT: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
    "jacobian": lambda model, x: functional.jacobian(model, x),  # type: ignore[no-untyped-call]
    "hvp": lambda model, x: functional.hvp(lambda x: loss(model, x), x, x),  # type: ignore[no-untyped-call]
    "grad of grad": lambda model, x: penalty(model, x).detach(),
}
if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
    REFUSED |= {name: RIGHT.pop(name) for name in ("jvp", "jacfwd")}
OF_FORWARD = ("jvp", "jacfwd", "vmap", "jacobian")
"""Those that keep no graph of backward."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x).square().sum()
    return out


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """The squared gradient of the loss with respect to the input, as a gradient penalty adds it."""
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(loss(model, x), x, create_graph=True)
    return grad.square().sum()


def taken(rank: int, ranks: int, stage: int) -> list[str]:
    """What differs from plain torch, where derivatives are taken before, between and after steps of training."""
    plain, x = net(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    zero = dzero.ZeroConfig(stage=stage, units=["Linear"])
    mesh = dzero.make_mesh("cpu", replicate=ranks if stage == 0 else 1)
    sharded = dzero.shard(copy.deepcopy(plain), zero, mesh=mesh, precision="fp32")
    optims = [dzero.TorchOptimizer(sharded, torch.optim.SGD, lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)]
    wrong = []
    for step in range(2):
        for take in REFUSED.values():
            with pytest.raises(RuntimeError, match=r"torch\.func\.grad, vjp"):
                take(sharded.model, x)
            take(plain, x)
        for name, take in RIGHT.items():
            if stage > 0 and name not in OF_FORWARD:
                continue
            pairs = zip(leaves(take(sharded.model, x)), leaves(take(plain, x)), strict=True)
            wrong += [f"{name} {step}" for found, due in pairs if not torch.allclose(found, due, rtol=1e-5, atol=1e-6)]
            wrong += [f"{name} {step}: .grad" for param in sharded.model.parameters() if param.grad is not None]
        plain.zero_grad()
        for model, optim in zip((sharded.model, plain), optims, strict=True):
            (loss(model, x) + (penalty(model, x) if stage == 0 else 0.0)).backward()
            optim.step()
            optim.zero_grad()
        values = zip(sharded.model.parameters(), plain.parameters(), strict=True)
        wrong += [f"weights {step}" for found, due in values if not torch.allclose(whole(found), due, atol=1e-6)]
    return wrong


def leaves(tree: Any) -> list[Tensor]:
    return [tree.detach()] if isinstance(tree, Tensor) else [leaf for branch in tree for leaf in leaves(branch)]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("stage", [0, 1, 3, 2])
def test_derivatives_are_right_or_refused_and_training_goes_on(pool: Pool, stage: int) -> None:
    assert pool.run(taken, 2, stage) == [[], []]
