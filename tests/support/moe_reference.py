"""A mixture of experts written token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TokenByToken(nn.Module):
    """The mixture as its formulas say, one token and one expert after the other, in fp64; it takes over the weights of
    `mixture`, a module of the sizes `shape`.

    chosen: how often each expert was, since the bias last moved.
    """

    def __init__(self, mixture: Any, shape: Any) -> None:
        super().__init__()
        self.shape = shape
        self.router, self.experts, self.shared = mixture.router, mixture.experts, mixture.shared
        self.chosen = torch.zeros(shape.experts)
        self.bias = torch.zeros(shape.experts) if mixture.router.bias is None else mixture.router.bias.clone()
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        shape, outs, choices, all_scores = self.shape, [], torch.zeros(self.shape.experts), []
        for token in x.double().flatten(0, -2).unbind():
            logits = self.router.weight.double() @ token
            scores = logits.softmax(0) if shape.scores == "softmax" else 1 / (1 + (-logits).exp())
            best = sorted(range(shape.experts), key=lambda e: -float((scores + self.bias)[e].detach()))[: shape.top_k]
            total = sum(scores[e] for e in best) if shape.top_k > 1 else 1.0
            out = sum(scores[e] / total * self.expert(e, token) for e in best)
            if self.shared is not None:
                gate, up, down = (getattr(self.shared, each).weight.double() for each in ("gate", "up", "down"))
                out = out + down @ (F.silu(gate @ token) * (up @ token))
            outs.append(out)
            choices[best] += 1
            all_scores.append(scores / scores.sum())
        self.chosen += choices
        if shape.balance == "loss":
            mean = torch.stack(all_scores).mean(0)
            self.loss = shape.rate * shape.experts * (choices / choices.sum() * mean).sum()
        return torch.stack(outs).view_as(x).to(x.dtype)  # type: ignore[arg-type]

    def expert(self, e: int, token: Tensor) -> Tensor:
        weights, ffn, hidden = self.experts, self.shape.ffn_size, self.shape.hidden_size
        gate, up = (each[e * ffn : (e + 1) * ffn].double() @ token for each in (weights.gate, weights.up))
        out: Tensor = weights.down[e * hidden : (e + 1) * hidden].double() @ (gate / (1 + (-gate).exp()) * up)
        return out


def token_by_token(model: Any) -> list[TokenByToken]:
    """Put the mixture of every layer into these words, in place."""
    for layer in model.layers:
        layer.ffn = TokenByToken(layer.ffn, model.shape)
    return [layer.ffn for layer in model.layers]


def rebalance(mixtures: Sequence[TokenByToken]) -> None:
    """After a step: each bias moves by the sign of what is missing to the mean."""
    for each in mixtures:
        if each.shape.balance == "auxiliary-loss-free":
            each.bias = each.bias + each.shape.rate * torch.sign(each.chosen.mean() - each.chosen)
        each.chosen.zero_()
