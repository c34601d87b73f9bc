"""What a step costs besides arithmetic: calls that do not grow with the number of parameters, and decoded moments."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from pool import Pool
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dzero import AdamW, PrecisionConfig, ZeroConfig, shard
from dzero.optim import adamw, cpu_kernels
from dzero.optim.flat_update import AdamWUpdater, CpuUpdateTable, ParamUpdate

BLOCKS, WIDTH = 3, 8


class Calls(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """As many matrices as asked for, one after the other."""

    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(matrices))

    def forward(self, x: Tensor) -> Tensor:
        """[batch, width] -> the same."""
        for weight in self.weights:
            x = x + x @ weight
        return x


def calls_of_a_step(rank: int, ranks: int, matrices: int, moments: str) -> tuple[dict[str, int], dict[str, int]]:
    """Of the third step: torch's operators in `step()`, and calls of the CPU's kernels in all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(matrices) for _ in range(BLOCKS)))
    precision = PrecisionConfig(param="bf16", moments=moments)
    sharded = shard(model, ZeroConfig(stage=2), precision=precision)
    optim = AdamW(sharded, threads=1)
    kernels: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            kernels[name] += 1
            return function(*args, **kwargs)

        return run

    x = torch.randn(4, WIDTH).bfloat16()
    for _ in range(3):
        kernels.clear()
        with (
            patch.object(cpu_kernels, "sum_squares", counted("sum_squares", cpu_kernels.sum_squares)),
            patch.object(CpuUpdateTable, "update", counted("update", CpuUpdateTable.update)),
        ):
            sharded.model(x).float().square().mean().backward()
            with Calls() as calls:
                optim.step()
        optim.zero_grad()
    assert optim.last_decision is not None
    assert optim.last_decision.finite
    return dict(calls.counts), dict(kernels)


@pytest.mark.parametrize("moments", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_makes_as_many_calls_whatever_the_number_of_parameters(pool: Pool, ranks: int, moments: str) -> None:
    """Sums of squares: one call for each unit (the root has no parameters). The update: one for all."""
    few, many = (pool.run(calls_of_a_step, ranks, matrices, moments)[0] for matrices in (2, 20))
    assert few == many
    assert few[1] == {"sum_squares": BLOCKS, "update": 1}


def decoded(rank: int, ranks: int, elems: int) -> tuple[list[int], list[float]]:
    """Elements whose 8-bit moments are decoded at a time, when `elems` may be; and the parameters after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    sharded = shard(model, ZeroConfig(stage=3), precision=PrecisionConfig(param="bf16", moments="int8"))
    optim, at_once = AdamW(sharded, threads=1), []
    run = AdamWUpdater.run

    def watched(self: AdamWUpdater, updates: Sequence[ParamUpdate], before_piece: object) -> None:
        at_once.append(sum(update.states.m.numel() for update in updates))
        run(self, updates)

    with patch.object(adamw, "DECODED_ELEMS", elems), patch.object(AdamWUpdater, "run", watched):
        for _ in range(2):
            sharded.model(torch.ones(2, WIDTH).bfloat16()).float().square().mean().backward()
            optim.step()
            optim.zero_grad()
    whole = [param.full_tensor().float().flatten() for param in sharded.model.parameters()]
    return at_once, torch.cat(whole).tolist()


def test_few_moments_of_8_bits_are_decoded_at_a_time(pool: Pool) -> None:
    """Else a step would hold all moments in fp32, four times what they take between steps."""
    size = WIDTH * WIDTH
    two, two_params = pool.run(decoded, 1, 2 * size)[0]
    every, every_params = pool.run(decoded, 1, 4 * size)[0]
    assert (two, every) == ([2 * size] * 4, [4 * size] * 2)
    assert two_params == every_params
