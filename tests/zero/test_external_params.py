"""A parameter that another unit's forward uses: one unit of both if both register it, else an error that says so."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import dzero

STEPS, WIDTH = 3, 32
ENDS = ((2, 0), (0, 2))
"""The block that uses a weight, and the one that has it."""


class Block(nn.Module):
    """A layer that may use the weight of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.other: tuple[nn.Linear, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + sum(nn.functional.linear(x, other.weight) for other in self.other)


class Net(nn.Module):
    """Three blocks, the first or the last of which uses the weight of the other."""

    def __init__(self, user: int, used: int, *, registered: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.blocks[user].other = (self.blocks[used].layer,)
        if registered:
            self.blocks[user].shared = self.blocks[used].layer.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def losses(stage: int | None, ends: tuple[int, int], *, registered: bool) -> list[float] | str:
    """Losses on the same batch on every rank, or the error; with `stage` None, of plain torch."""
    torch.manual_seed(0)
    model = Net(*ends, registered=registered)
    batch, options = torch.randn(4, WIDTH), {"lr": 1e-2, "weight_decay": 0.0}
    if stage is None:
        optim: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **options)  # type: ignore[arg-type]
    else:
        optim = dzero.AdamW(sharded := dzero.shard(model, stage, precision="fp32"), **options)  # type: ignore[arg-type]
        model = sharded.model  # type: ignore[assignment]
    told = []
    for _ in range(STEPS):
        try:
            loss = model(batch).square().mean()
        except RuntimeError as error:
            return str(error)
        loss.backward()
        optim.step()
        optim.zero_grad()
        told.append(loss.item())
    return told


CELLS = [(0, ENDS[0]), (2, ENDS[0]), (2, ENDS[1]), (3, ENDS[0]), (3, ENDS[1])]
GATHERED = [(2, ENDS[0])]
"""Where the weight is still whole, from the forward of the unit that has it."""


def of_all(rank: int, ranks: int, registered: bool) -> list[list[float] | str]:
    return [losses(stage, ends, registered=registered) for stage, ends in CELLS]


def test_a_parameter_that_its_user_registers_too_is_gathered_for_both(pool: Pool) -> None:
    for of_rank in pool.run(of_all, 2, True):
        for (stage, ends), found in zip(CELLS, of_rank, strict=True):
            assert found == pytest.approx(losses(None, ends, registered=True), rel=1e-6), stage


def test_else_the_error_says_where_it_was_used(pool: Pool) -> None:
    for of_rank in pool.run(of_all, 2, False):
        for cell, found in zip(CELLS, of_rank, strict=True):
            if cell in GATHERED:
                assert found == pytest.approx(losses(None, cell[1], registered=False), rel=1e-6), cell
                continue
            assert isinstance(found, str), cell
            assert "test_external_params.py" in found
            assert "register it in the module that uses it too (self.weight = other.weight)" in found
