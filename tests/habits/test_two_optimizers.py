"""Two optimizers over one model, a judged generator: they train its parts as in torch, and a parameter has one of them.

Plain torch takes the batches of all ranks in one process, a sharded model those of its own rank.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from many_cells import of_cells
from models_of_torch import OPTIONS, whole
from on_ranks import on_ranks
from pool import Pool
from torch import Tensor, nn

import dzero

WIDTH, STEPS, MAX_NORM = 8, 3, 0.05
MOMENTUM: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
Loss = Callable[[nn.Module, Tensor], Tensor]


class Judged(nn.Module):
    """A generator and its judge. With `real` the judge's loss, else the generator's."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.judge = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))

    def forward(self, noise: Tensor, *, real: bool) -> Tensor:
        made = self.generator(noise)
        if not real:
            return nn.functional.softplus(-self.judge(made)).mean()
        true = nn.functional.softplus(-self.judge(noise.repeat(1, 2))).mean()
        return true + nn.functional.softplus(self.judge(made.detach())).mean()


def of_judge(model: nn.Module, noise: Tensor) -> Tensor:
    """What the judge is trained on."""
    return model(noise, real=True)


def of_generator(model: nn.Module, noise: Tensor) -> Tensor:
    """What the generator is trained on; it leaves gradients in the judge as well."""
    return model(noise, real=False)


UNITS: dict[str, Callable[[nn.Module], bool]] = {
    "a unit each": lambda module: isinstance(module, nn.Sequential),
    "one unit for both": lambda module: False,
}
LOOPS: dict[str, tuple[tuple[Loss, tuple[int, ...]], ...]] = {
    "in turn": ((of_judge, (1,)), (of_generator, (0,))),
    "kept": ((of_judge, (1,)), (of_generator, (0,))),
    "together": ((of_generator, (0, 1)),),
}
"""The losses of a step, and which optimizers (0: the generator's, 1: the judge's) step after the backward of each. They
clear their gradients before that backward, or in `kept` after it: then the judge's hold what the generator's loss left.
"""


def train(
    model: nn.Module,
    optims: tuple[Any, Any],
    loop: str,
    microbatches: int,
    mine: slice,
    around: Callable[[bool], AbstractContextManager[None]],
) -> dict[str, Tensor]:
    """Train on the rows `mine` of every batch [ranks]."""
    draws = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        for loss, stepping in LOOPS[loop]:
            for number in stepping if loop != "kept" else ():
                optims[number].zero_grad()
            for index in range(microbatches):
                noise = torch.randn(2, 3, 4, generator=draws)[mine]
                with around(index == microbatches - 1):
                    (torch.stack([loss(model, each) for each in noise]).mean() / microbatches).backward()
            for number in stepping:
                optims[number].step()
            for number in stepping if loop == "kept" else ():
                optims[number].zero_grad()
    return {name: whole(param.detach()).clone() for name, param in model.named_parameters()}


def in_torch(ranks: int, loop: str, microbatches: int) -> dict[str, Tensor]:
    """The parameters that one process of plain torch ends with, clipped by each optimizer's own norm."""
    torch.manual_seed(0)
    model = Judged()
    inner = (
        torch.optim.AdamW(model.generator.parameters(), **OPTIONS),
        torch.optim.SGD(model.judge.parameters(), **MOMENTUM),
    )
    for optim in inner:
        optim.register_step_pre_hook(clip_)
    return train(model, inner, loop, microbatches, slice(ranks), lambda is_last: nullcontext())


def clip_(optim: torch.optim.Optimizer, *_: object) -> None:
    torch.nn.utils.clip_grad_norm_(optim.param_groups[0]["params"], MAX_NORM)


def in_dzero(rank: int, ranks: int, stage: int, units: str, loop: str, microbatches: int) -> dict[str, Tensor]:
    """The same of a sharded model, on this rank's batches."""
    sharded = sharded_judged(stage, units, microbatches)
    optims = optimizers_of(sharded)
    return train(sharded.model, optims, loop, microbatches, slice(rank, rank + 1), sharded.microbatch)


def sharded_judged(stage: int, units: str = "a unit each", microbatches: int = 1, **options: Any) -> dzero.Sharded:
    """The model, cut over all ranks."""
    torch.manual_seed(0)
    zero = dzero.ZeroConfig(stage=stage, units=UNITS[units])
    return dzero.shard(Judged(), zero, microbatches=microbatches, **{"precision": "fp32", **options})


def optimizers_of(sharded: dzero.Sharded) -> tuple[dzero.AdamW, dzero.TorchOptimizer]:
    """The generator's and the judge's."""
    model: Any = sharded.model
    return (
        dzero.AdamW(sharded, model.generator.parameters(), max_norm=MAX_NORM, **OPTIONS),
        dzero.TorchOptimizer(sharded, torch.optim.SGD, model.judge.parameters(), max_norm=MAX_NORM, **MOMENTUM),
    )


Cell = tuple[int, str, str, int]
SOME: list[Cell] = [
    (3, "a unit each", "in turn", 3),
    (2, "one unit for both", "kept", 3),
    (0, "a unit each", "together", 1),
    (1, "a unit each", "kept", 1),
]
CELLS = [(2, SOME), *((ranks, [*product([stage], UNITS, LOOPS, [1, 4])]) for ranks in (1, 2) for stage in range(4))]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("ranks", "cells"), CELLS)
def test_two_optimizers_train_their_parts_as_in_torch(pool: Pool, ranks: int, cells: list[Cell]) -> None:
    for cell, of_ranks in zip(cells, of_cells(pool, ranks, in_dzero, cells), strict=True):
        _, _, loop, microbatches = cell
        expected = in_torch(ranks, loop, microbatches)
        for found in of_ranks:
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=str(cell))


@on_ranks(1)
def test_a_parameter_has_one_optimizer(rank: int, ranks: int, tmp_path: Path) -> None:
    """A parameter that has an optimizer, at once and added later; what two cannot share; and once one is gone."""
    sharded = sharded_judged(2)
    generator, judge = optimizers_of(sharded)
    taken = r"generator\.0\.(weight|bias): its gradients already go to another optimizer"
    with pytest.raises(RuntimeError, match=f"^{taken}"):
        dzero.AdamW(sharded)
    with pytest.raises(RuntimeError, match=f"^{taken}"):
        judge.add_param_group({"params": generator.param_groups[0]["params"][:1]})
    assert len(judge.param_groups) == 1
    others = r"judge\.\d\.(weight|bias): another optimizer updates it"
    config = dzero.CheckpointConfig(folder=str(tmp_path))
    with dzero.Checkpointer(config, sharded, generator) as late, pytest.raises(ValueError, match=others):
        late.save(1, {})
    with pytest.raises(ValueError, match=others):
        dzero.Checkpointer(replace(config, every=1), sharded, generator)
    for options, says in (({"offload": "host"}, "states off the device"), ({"precision": "fp16"}, "fp16")):
        with pytest.raises(RuntimeError, match=says):
            optimizers_of(sharded_judged(2, **options))
    del generator, late
    gc.collect()
    dzero.AdamW(sharded, sharded.model.generator.parameters())
