"""Writes into parameters in forward: what they are in torch, or one clear line.

Writes and draws outside of a forward, as all expressions on weights, are those of docs/reference/expressions.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models_of_torch import said_by, whole
from pool import Pool
from torch import Tensor, nn

from dzero import AdamW, shard

LOST = "would be lost"
WRITES: dict[str, Any] = {
    "clamp": lambda weight, x: weight.clamp_(-0.5, 0.5),
    "to itself": lambda weight, x: weight.mul_(1.0),
    "negated": lambda weight, x: weight.neg_(),  # the bits together are as they were, in another order
    "from data": lambda weight, x: weight.data.copy_(weight.data - x.mean()),
    "set": lambda weight, x: setattr(weight, "data", weight.data * 0.9),
    "norm": lambda weight, x: None,  # the embedding before it writes
}


class Writes(nn.Module):
    """Writes into its weight when it is called."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.linspace(-1, 1, 35).view(7, 5)), how

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            WRITES[self.how](self.weight, x)
        return x @ self.weight.t() @ self.weight


def writing(how: str) -> nn.Module:
    torch.manual_seed(0)
    embedding = nn.Embedding(6, 5, max_norm=0.5 if how == "norm" else None)
    return nn.Sequential(embedding, Writes(how), nn.Linear(5, 3))


def step_of(model: nn.Module, optim: Any) -> Tensor:
    optim.zero_grad()
    model(torch.arange(6)).square().mean().backward()
    optim.step()
    return whole(next(p for p in model.parameters()).detach()).clone()


def written_in_forward(rank: int, ranks: int, stage: int, offload: str | None) -> dict[str, Tensor | str]:
    """By how: the first parameter after two steps, or what was said."""
    ends: dict[str, Tensor | str] = {}
    for how in WRITES:
        sharded = shard(writing(how), stage, precision="fp32", offload=offload)
        optim, found = AdamW(sharded, lr=0.1, weight_decay=0.0), list[Tensor]()
        said = said_by(lambda: found.extend(step_of(sharded.model, optim) for _ in range(2)))  # noqa: B023
        ends[how] = said or found[-1]
    return ends


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(("stage", "offload"), [(3, "host_all"), (3, None), (0, None), (1, None), (2, None)])
def test_a_write_into_a_gathered_copy_in_forward_is_refused(pool: Pool, stage: int, offload: str | None) -> None:
    for ends in pool.run(written_in_forward, 2, stage, offload):
        for how, found in ends.items():
            if how == "to itself" or (stage == 0 and how != "set"):
                model = writing(how)
                optim = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
                torch.testing.assert_close(found, [step_of(model, optim) for _ in range(2)][-1])
            else:
                assert isinstance(found, str)
                assert LOST in found
                assert ("0.weight" if how == "norm" else "1.weight") in found
