"""Plausible mistakes are errors that name the repair, never wrong weights; and what the user drops is freed."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import small_decoders
import torch
from many_cells import of_cells
from pool import Pool
from training_loops import sharded_net

from dzero import AdamW, Sharded, ZeroConfig, shard


def backward(sharded: Sharded, rank: int, ranks: int, optim: AdamW | None = None) -> None:
    batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1)[0][rank][0]
    loss = small_decoders.loss_fn(sharded.model, batch)
    (loss if optim is None else optim.scale_loss(loss)).backward()


def message(call: Callable[[], object]) -> str:
    with pytest.raises((RuntimeError, ValueError)) as error:
        call()
    return str(error.value)


class Unfit(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def mistakes(rank: int, ranks: int) -> dict[str, str]:
    """What is said of each mistake."""
    said = {}

    sharded = sharded_net("even", stage=2, param="fp32")
    said["cast"] = message(lambda: sharded.model.to(torch.bfloat16))

    sharded = sharded_net("even", stage=3)
    optim = AdamW(sharded, [*sharded.named_params().values()][:4])
    said["second optimizer"] = message(lambda: AdamW(sharded))

    sharded = sharded_net("frozen", stage=2)
    for param in sharded.model.parameters():
        param.requires_grad_(True)
    said["unfrozen"] = message(lambda: AdamW(sharded))

    sharded = sharded_net("even", stage=2, param="fp16")
    optim = AdamW(sharded)
    backward(sharded, rank, ranks)
    said["unscaled"] = message(optim.step)
    optim.zero_grad()
    optim.scale_loss(sharded.model(torch.zeros(1, 4, dtype=torch.int64)).float().sum()).backward()
    optim.step()
    backward(sharded, rank, ranks)
    said["unscaled after a scaled one"] = message(optim.step)

    sharded = sharded_net("even", stage=3)
    optim = AdamW(sharded)
    sharded.model.layers[0].register_forward_hook(lambda _, __, out: Unfit.apply(out))
    with pytest.raises(ArithmeticError):
        backward(sharded, rank, ranks)
    said["raised"] = message(optim.step)
    return said


def test_mistakes_are_told_with_their_repair(pool: Pool) -> None:
    said = pool.run(mistakes, 2)[0]
    expected = {
        "cast": "choose the dtype before, by precision.param=",
        "second optimizer": "parameter groups",
        "unfrozen": "was frozen when the model was sharded",
        "unscaled": "scale_loss",
        "unscaled after a scaled one": "scale_loss",
        "raised": r"call zero_grad\(\), and repeat the step",
    }
    assert said.keys() == expected.keys()
    for mistake, words in expected.items():
        assert re.search(words, said[mistake]), (mistake, said[mistake])


class Branching(torch.nn.Module):
    """Two equal layers; a rank may run them the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, *, swap: bool) -> torch.Tensor:
        for layer in reversed(self.layers) if swap else self.layers:
            x = layer(x)
        return x


def branching(rank: int, ranks: int) -> list[str]:
    said = []
    for stage in range(4):
        sharded = shard(Branching(), ZeroConfig(stage=stage))
        optim = AdamW(sharded)
        sharded.model(torch.ones(2, 8), swap=rank == ranks - 1).sum().backward()
        said.append(message(optim.step))
    return said


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_run_units_in_different_orders_are_refused_and_both_orders_told(pool: Pool, ranks: int) -> None:
    """Equal sizes, so the messages match and nothing else would notice."""
    first = ["all_reduce of layers.{} over replicate", *["all_gather of layers.{} over shard"] * 3]
    for said in pool.run(branching, ranks):
        assert all(f"ranks [{ranks - 1}] ran the model's units in another order" in words for words in said), said
        for stage, words in enumerate(said):
            theirs, ours = (1, 0) if stage == 0 else (0, 1)  # backward reduces the last layer first
            assert f"rank 0: {first[stage].format(theirs)}" in words
            assert f"rank {ranks - 1}: {first[stage].format(ours)}" in words


def survivors(rank: int, ranks: int, stage: int) -> list[str]:
    """Train a step, drop everything, and tell what is still alive."""
    sharded = sharded_net("even", stage=stage)
    optim = AdamW(sharded)
    backward(sharded, rank, ranks)
    optim.step()
    watched = {"sharded": sharded, "optimizer": optim, "gradients": optim.gradients, "model": sharded.model}
    references = {name: weakref.ref(value) for name, value in watched.items()}
    del sharded, optim, watched
    gc.collect()
    return [name for name, reference in references.items() if reference() is not None]


def test_dropped_models_and_optimizers_are_freed(pool: Pool) -> None:
    """No reference survives in FSDP2's or autograd's hooks."""
    assert of_cells(pool, 2, survivors, [(0,), (3,)]) == [[[], []]] * 2
