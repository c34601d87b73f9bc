"""Check that a model keeps the conversations of a packed sequence apart, on the model and the ranks of the run.

Models of transformers are given positions that restart with every conversation. Most of its models confine attention
to them; others only count by them, or take no notice, and none says so. State-space layers and convolutions carry
their state on. So the sharded model is run twice, and the loss of a conversation behind two others is compared.

    first run     [a b c d | x y z]      loss of x y z
    second run    [b c d a | x y z]      the same bits, if the model keeps conversations apart

A sum over masked keys has weights of exactly 0, so a difference of one bit is a leak. Positions are not checked.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from dzero.comm.collectives import gather_json
from dzero.data.batch import IGNORED, Batch
from dzero.models.hf import class_name
from dzero.models.llama import Llama
from dzero.trainer.build import BuiltModel

MOST_COUNTED = 8
"""Number of tokens, from the beginning of the second conversation on, whose losses are compared."""


def check_isolation(built: BuiltModel, batch: Batch) -> None:
    """Raise ValueError if the model's output for a conversation depends on the one before it. Collective.

    Llama, whose mask is its own, is not run. Nothing of the model's state changes.

    Args:
        built: Model, sharded and filled.
        batch: Any microbatch of the run, the same on all ranks. Nothing is checked if it is not packed.
    """
    model = built.sharded.model
    tokens, time = batch.tokens, batch.tokens.shape[1]
    if batch.positions is None or time < 2 or isinstance(model, Llama):
        return
    kinds = torch.unique(tokens)
    if len(kinds) < 2:
        return
    half = time // 2
    other = tokens.clone()
    other[:, :half] = kinds[(torch.searchsorted(kinds, tokens[:, :half].contiguous()) + 1) % len(kinds)]
    positions = torch.cat([torch.arange(half), torch.arange(time - half)]).expand_as(tokens).contiguous()
    targets = torch.full_like(tokens, IGNORED)
    counted = min(MOST_COUNTED, time - half)
    targets[:, half : half + counted] = kinds[-1]
    losses = [_loss(built, Batch(each, targets, positions)) for each in (tokens, other)]
    built.sharded.ledger.take()  # discard the traffic
    world = dist.group.WORLD
    assert world is not None
    # Where ranks share sequences, one of them may have all of the tokens that are compared.
    leaks = [each for each in gather_json([each.tolist() for each in losses], world) if each[0] != each[1]]
    if leaks:
        name = class_name(model)
        first, second = (total / counted for total, counted in leaks[0])
        raise ValueError(
            f"data.pack=true: {name} does not keep packed conversations apart: the loss of one is {first:.6g} or "
            f"{second:.6g}, by the one before it; set data.pack=false"
        )


@torch.no_grad()
def _loss(built: BuiltModel, batch: Batch) -> Tensor:
    built.sharded.train(False)
    with built.losses():
        found = built.held_out(batch)
    built.sharded.train(True)
    built.sharded.reshard()
    return found
