"""Calls of torch on a sharded model: derivatives besides a loss's, right or refused, and the divisor of gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from on_ranks import on_ranks
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn
from torch.autograd import functional
from torch.distributed.fsdp import FSDPModule, fully_shard

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
    plain, x, gathers = net(), torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), stage > 0 and ranks > 1
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
            if gathers and name not in OF_FORWARD:
                continue
            pairs = zip(leaves(take(sharded.model, x)), leaves(take(plain, x)), strict=True)
            wrong += [f"{name} {step}" for found, due in pairs if not torch.allclose(found, due, rtol=1e-5, atol=1e-6)]
            wrong += [f"{name} {step}: .grad" for param in sharded.model.parameters() if param.grad is not None]
        plain.zero_grad()
        for model, optim in zip((sharded.model, plain), optims, strict=True):
            (loss(model, x) + (0.0 if gathers else penalty(model, x))).backward()
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
    assert pool.run(taken, 1, stage) == [[]]


# `set_gradient_divide_factor` means what it means in FSDP2, which runs beside it

OFF = dzero.OffloadConfig(grad="host", master="host", moments="host")


def divided(model: nn.Module, factor: float | None, *, old_name: bool) -> None:
    """Set the divisor in every unit, as loops of torchtitan do."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            name = "set_reduce_scatter_divide_factor" if old_name else "set_gradient_divide_factor"
            getattr(module, name)(factor)


def batches(rank: int, count: int) -> list[Tensor]:
    return [*torch.randn(count, 3, 4, generator=torch.Generator().manual_seed(rank))]


def in_fsdp2(rank: int, replicate: int, microbatches: int, factor: float | None) -> dict[str, Tensor]:
    model = net()
    mesh = dzero.make_mesh("cpu", replicate=replicate)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh if replicate > 1 else mesh["shard"])
    divided(model, factor, old_name=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply before it adds
    for index, x in enumerate(batches(rank, microbatches)):
        model.set_requires_gradient_sync(index == microbatches - 1)  # type: ignore[operator]
        model(x).mean().backward()
    return {name: whole(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def in_dzero(
    rank: int, stage: int, reduction: str, replicate: int, microbatches: int, offload: Any, factor: float | None
) -> dict[str, Tensor]:
    sharded = dzero.shard(
        net(),
        dzero.ZeroConfig(stage=stage, reduction=reduction, units=lambda each: isinstance(each, nn.Linear)),
        mesh=dzero.make_mesh("cpu", replicate=replicate),
        microbatches=microbatches,
        precision="fp32",
        offload=offload,
    )
    optim = dzero.AdamW(sharded, lr=0.1)
    divided(sharded.model, factor, old_name=stage % 2 == 0)
    for index, x in enumerate(batches(rank, microbatches)):
        with sharded.microbatch(is_last=index == microbatches - 1):
            sharded.model(x).mean().backward()
    found = {name: whole(param.grad) for name, param in sharded.named_params().items() if param.grad is not None}
    optim.step()
    return found


CELLS = [
    (0, "exact", 2, 3.0),
    (1, "native", 1, 3.0),
    (2, "exact", 2, 2.0),
    (3, "native", 2, 1.0),
    (3, "exact", 1, None),
]
"""Stage, way of reducing, microbatches, and divisor; with a divisor of 2, states are on the host."""


def compared(rank: int, ranks: int, replicated: bool, cells: list[tuple[int, str, int, float | None]]) -> None:
    for stage, reduction, microbatches, factor in cells:
        replicate = ranks if stage == 0 else 2 if replicated else 1
        offload = OFF if factor == 2.0 else None
        ours = in_dzero(rank, stage, reduction, replicate, microbatches, offload, factor)
        theirs = in_fsdp2(rank, replicate if stage else 1, microbatches, factor)
        assert ours.keys() == theirs.keys()
        for name, grad in ours.items():
            torch.testing.assert_close(grad, theirs[name], rtol=1e-5, atol=1e-7, msg=f"{name} {stage} {factor}")


def test_gradients_are_divided_as_in_fsdp2(pool: Pool) -> None:
    pool.run(compared, 2, False, CELLS)
    pool.run(compared, 4, True, CELLS[2:3])


@on_ranks(1)
def test_a_divisor_that_is_no_number_above_zero_is_refused(rank: int, ranks: int) -> None:
    sharded = dzero.shard(net(), stage=2, precision="fp32")
    for factor in (0.0, -1.0, float("nan"), "2"):
        with pytest.raises(ValueError, match=r"set_gradient_divide_factor.*a number above 0"):
            divided(sharded.model, factor, old_name=False)  # type: ignore[arg-type]
