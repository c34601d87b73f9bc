"""Two optimizers over one model, a judged generator: they train its parts as in torch, and a parameter has one of them.

Plain torch takes the batches of all ranks in one process, a sharded model those of its own rank.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models_of_torch import HOST, OPTIONS, whole
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
    mesh = dzero.make_mesh("cpu", replicate=dist.get_world_size() if stage == 0 else 1)
    options = {"precision": dzero.PrecisionConfig(param="fp32"), **options}
    return dzero.shard(
        Judged(), dzero.ZeroConfig(stage=stage, units=UNITS[units]), mesh=mesh, microbatches=microbatches, **options
    )


def optimizers_of(sharded: dzero.Sharded) -> tuple[dzero.AdamW, dzero.TorchOptimizer]:
    """The generator's and the judge's."""
    generator, judge = sharded.model.generator, sharded.model.judge
    assert isinstance(generator, nn.Module)
    assert isinstance(judge, nn.Module)
    return (
        dzero.AdamW(sharded, generator.parameters(), max_norm=MAX_NORM, **OPTIONS),
        dzero.TorchOptimizer(sharded, torch.optim.SGD, judge.parameters(), max_norm=MAX_NORM, **MOMENTUM),
    )


Cell = tuple[int, str, str, int]
SOME: list[Cell] = [
    (3, "a unit each", "in turn", 3),
    (2, "one unit for both", "kept", 3),
    (0, "a unit each", "together", 1),
    (1, "a unit each", "kept", 1),
]


def check(pool: Pool, ranks: int, cells: list[Cell]) -> None:
    for stage, units, loop, microbatches in cells:
        expected = in_torch(ranks, loop, microbatches)
        for found in pool.run(in_dzero, ranks, stage, units, loop, microbatches):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=f"{units}, {loop}, {microbatches}")


def test_two_optimizers_train_their_parts_as_in_torch(pool: Pool) -> None:
    check(pool, 2, SOME)


@pytest.mark.full("tests/habits/test_two_optimizers.py::test_two_optimizers_train_their_parts_as_in_torch")
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_optimizers_train_their_parts_as_in_torch_full_product(pool: Pool, stage: int, ranks: int) -> None:
    check(pool, ranks, [*product([stage], UNITS, LOOPS, [1, 4])])


def refused_beside_another(rank: int, ranks: int, folder: Path) -> list[str]:
    """What is said of a parameter that has an optimizer, at once and added later, and where two cannot share."""
    told = []
    sharded = sharded_judged(2)
    generator, judge = optimizers_of(sharded)
    with pytest.raises(RuntimeError) as raised:
        dzero.AdamW(sharded)
    told.append(str(raised.value))
    with pytest.raises(RuntimeError) as raised:
        judge.add_param_group({"params": generator.param_groups[0]["params"][:1]})
    told.append(str(raised.value))
    assert len(judge.param_groups) == 1
    config = dzero.CheckpointConfig(folder=str(folder), every=1)
    others = r"judge\.\d\.(weight|bias): another optimizer updates it"
    with (
        dzero.Checkpointer(replace(config, every=None), sharded, generator) as late,
        pytest.raises(ValueError, match=others),
    ):
        late.save(1, {})
    with pytest.raises(ValueError, match=others):
        dzero.Checkpointer(config, sharded, generator)
    half = dzero.PrecisionConfig(param="fp16")
    for options in ({"offload": dzero.OffloadConfig(**HOST)}, {"precision": half}):
        with pytest.raises(RuntimeError) as raised:
            optimizers_of(sharded_judged(2, **options))
        told.append(str(raised.value))
    del generator, late
    gc.collect()
    dzero.AdamW(sharded, sharded.model.generator.parameters())
    return told


def test_a_parameter_has_one_optimizer(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(refused_beside_another, 1, tmp_path):
        for text in told[:2]:
            assert re.match(r"generator\.0\.(weight|bias): its gradients already go to another optimizer", text)
        assert "states off the device" in told[2]
        assert "fp16" in told[3]
