"""Plausible mistakes are errors that name the repair, never wrong weights."""

from __future__ import annotations

import pytest
import small_decoders
import torch
from on_ranks import on_ranks
from pool import Pool
from training_loops import Raising, backward, sharded_net

from dzero import AdamW, ZeroConfig, shard


@on_ranks(2)
def test_mistakes_are_told_with_their_repair(rank: int, ranks: int) -> None:
    batch = small_decoders.batches("even", steps=1, ranks=ranks, microbatches=1)[0][rank]
    sharded = sharded_net("frozen", stage=2)
    for param in sharded.model.parameters():
        param.requires_grad_(True)
    with pytest.raises(ValueError, match="was frozen when the model was sharded"):
        AdamW(sharded)

    sharded = sharded_net("even", stage=2, param="fp16")
    optim = AdamW(sharded)
    for _ in range(2):  # at first, and after a scaled one
        small_decoders.loss_fn(sharded.model, batch[0]).backward()
        with pytest.raises(RuntimeError, match="scale_loss"):
            optim.step()
        optim.zero_grad()
        backward(sharded, optim, batch)
        optim.step()

    sharded = sharded_net("even", stage=3)
    optim = AdamW(sharded)
    sharded.model.layers[0].register_forward_hook(lambda _, __, out: Raising.apply(out))
    with pytest.raises(ArithmeticError):
        backward(sharded, optim, batch)
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\), and repeat the step"):
        optim.step()


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
        with pytest.raises(RuntimeError) as error:
            optim.step()
        said.append(str(error.value))
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
