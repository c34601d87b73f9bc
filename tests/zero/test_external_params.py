"""A parameter that another unit's forward uses: one unit of both if both register it, else an error that says so."""

from __future__ import annotations

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import dzero

STEPS, WIDTH = 3, 32


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


def losses(rank: int, ranks: int, stage: int | None, ends: tuple[int, int], registered: bool) -> list[float] | str:
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


@pytest.mark.parametrize("ends", [(2, 0), (0, 2)])
def test_a_parameter_that_its_user_registers_too_is_gathered_for_both(pool: Pool, ends: tuple[int, int]) -> None:
    plain = losses(0, 1, None, ends, True)
    for stage in range(4):
        found = pool.run(losses, 2, stage, ends, True)
        assert found == [pytest.approx(plain, rel=1e-6)] * 2, stage


def test_else_the_error_says_where_it_was_used(pool: Pool) -> None:
    for stage, ends in ((3, (2, 0)), (3, (0, 2)), (2, (0, 2)), (0, (2, 0))):
        for told in pool.run(losses, 2, stage, ends, False):
            assert isinstance(told, str), (stage, ends)
            assert "test_external_params.py" in told
            assert "register it in the module that uses it too (self.weight = other.weight)" in told
    plain = losses(0, 1, None, (2, 0), False)
    assert pool.run(losses, 2, 2, (2, 0), False) == [pytest.approx(plain, rel=1e-6)] * 2  # still gathered there
