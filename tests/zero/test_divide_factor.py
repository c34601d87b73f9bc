"""`set_gradient_divide_factor` of a sharded model means what it means in FSDP2, which runs beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity_cells import whole
from pool import Pool
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import dzero

OFF = dzero.OffloadConfig(grad="host", master="host", moments="host")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def divided(model: nn.Module, factor: float | None, *, old_name: bool) -> None:
    """Set the divisor in every unit, as loops of torchtitan do."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            name = "set_reduce_scatter_divide_factor" if old_name else "set_gradient_divide_factor"
            getattr(module, name)(factor)


def batches(rank: int, count: int) -> list[Tensor]:
    return [*torch.randn(count, 4, 5, generator=torch.Generator().manual_seed(rank))]


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


def refused(rank: int, ranks: int) -> None:
    sharded = dzero.shard(net(), stage=2, precision="fp32")
    for factor in (0.0, -1.0, float("nan"), "2"):
        with pytest.raises(ValueError, match=r"set_gradient_divide_factor.*a number above 0"):
            divided(sharded.model, factor, old_name=False)  # type: ignore[arg-type]


def test_a_divisor_that_is_no_number_above_zero_is_refused(pool: Pool) -> None:
    pool.run(refused, 1)
