"""A mixture of experts in plain torch: the decoder of `llama.py`, in which a token uses a few of many SwiGLUs.

    router -> the top_k experts of each token, and their weights: scores that sum to 1 (of one alone: the score)
    tokens, sorted by their expert -> experts: one SwiGLU for each run of them -> weighted sum (+ what is shared)

No token is dropped and no expert has a capacity. Weights of experts are stacked, rows of one after those of the other:
gate and up [experts * ffn, hidden], down [experts * hidden, ffn]. Two dims, not three: ZeRO cuts dim 0, which then
has rows for any number of ranks, however few the experts.

Note: balance. Tokens choose their experts, and without more than the loss all choose a few.

    auxiliary-loss-free   A bias for each expert is added to the scores from which the choice is made, and only there.
                          After a step  bias += rate * sign(mean load - load)  (DeepSeek-V3, section 2.1.2), where an
                          expert's load is how often it was chosen, in all microbatches on all ranks of that step.
    loss                  rate * experts * sum_e share_e * score_e  is added to the loss, for each layer (Switch
                          Transformer, eq. 4): share_e of the choices are expert e, its mean score is score_e, both of
                          the microbatch of one rank, or of those of tp, which share it. It is 1 * rate where all are
                          chosen alike. A product of two means is not the mean of products: more ranks or microbatches
                          make another loss of the same data.
    none                  Nothing.

Loads are counted in backward: once for each microbatch, whether or not its forward was computed twice, and never for
what is only evaluated.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dzero.models.llama import DEVIATION, Llama, SwiGLU, residual_deviation
from dzero.models.shapes import MoEShape


class MoE(Llama):
    """tokens int64 [batch, time] -> logits [batch, time, vocab] in the parameters' dtype."""

    shape: MoEShape

    def __init__(self, shape: MoEShape) -> None:
        super().__init__(shape, lambda: Mixture(shape))

    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """As `Llama.features`; from here on `balance_loss` is that of these tokens."""
        for mixture in self._mixtures():
            mixture.loss = None
        return super().features(tokens, positions)

    def balance_loss(self) -> Tensor | None:
        """What is added to the loss of the last forward [fp32 scalar], summed over the layers; None for nothing."""
        losses = [mixture.loss for mixture in self._mixtures() if mixture.loss is not None]
        return torch.stack(losses).sum() if losses else None

    def _mixtures(self) -> list[Mixture]:
        return [module for module in self.modules() if isinstance(module, Mixture)]


class Mixture(nn.Module):
    """x [batch, time, hidden] -> the same: of each token the weighted sum of its experts, and what is shared.

    loss: see the note; of the last forward.
    """

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.top_k, self.loss_rate = shape.top_k, shape.rate if shape.balance == "loss" else 0.0
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.shared = SwiGLU(shape, shape.shared_experts * shape.ffn_size) if shape.shared_experts else None
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Each token by itself."""
        tokens = x.flatten(0, -2)
        scores, weights, chosen = self.router(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = times_chosen(chosen, scores.shape[1])
        if self.router.load is not None:
            weights = _Counted.apply(weights, counts, self.router.load)  # type: ignore[no-untyped-call]
        rows = self.experts(tokens[order // self.top_k], counts)
        of_choices = torch.empty_like(rows).index_copy(0, order, rows).view(*chosen.shape, -1)
        out: Tensor = (of_choices * weights.to(rows.dtype).unsqueeze(-1)).sum(1)
        if self.loss_rate and torch.is_grad_enabled():
            sums = self.over_tokens(token_sums(scores, counts))
            out = self._with_loss(out, balance_loss(sums, self.top_k) * self.loss_rate)
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)

    def over_tokens(self, sums: Tensor) -> Tensor:
        """Of sums over this call's tokens those over all of its loss: replaced where other ranks have some of them."""
        return sums

    def _with_loss(self, out: Tensor, loss: Tensor) -> Tensor:
        """Backward through the loss must not begin before that through `out`, with which FSDP2 gathers parameters."""
        out, loss = _Together.apply(out, loss)  # type: ignore[no-untyped-call]
        if self.loss is None:  # else this is its recomputation in backward
            self.loss = loss
        return out


class Router(nn.Module):
    """Which experts a token uses. `bias`, `load` fp32 and int64 [experts], of auxiliary-loss-free balance; else None.

    load: how often each was chosen since the last `rebalance`, on this rank.
    """

    bias: Tensor | None
    load: Tensor | None

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.top_k, self.softmax, self.rate = shape.top_k, shape.scores == "softmax", shape.rate
        self.weight = nn.Parameter(torch.empty(shape.experts, shape.hidden_size))
        balances = shape.balance == "auxiliary-loss-free"
        self.register_buffer("bias", torch.empty(shape.experts) if balances else None)
        load = torch.empty(shape.experts, dtype=torch.int64) if balances else None
        self.register_buffer("load", load, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights as of any projection; no expert is preferred."""
        nn.init.normal_(self.weight, std=DEVIATION)
        for buffer in (self.bias, self.load):
            if buffer is not None:
                buffer.zero_()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens [n, hidden] -> scores fp32 [n, experts], weights fp32 [n, top_k], experts int64 [n, top_k]."""
        logits = F.linear(tokens.float(), self.weight.float())
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        preferred = scores if self.bias is None else scores + self.bias
        chosen = preferred.detach().topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.top_k > 1:  # one alone would weigh 1 whatever its score, and the router learn nothing
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, weights, chosen

    @torch.no_grad()
    def rebalance(self, load: Tensor) -> None:
        """Move the bias once. load: int64 [experts], of a step's microbatches on all ranks."""
        assert self.bias is not None
        assert self.load is not None
        above = load * load.numel() - load.sum()  # whole numbers, so that a load that is the mean is found to be
        self.bias -= self.rate * above.sign()
        self.load.zero_()


class Experts(nn.Module):
    """Stacked SwiGLUs: rows [n, hidden], sorted by their expert, of which each has counts [experts] -> [n, hidden]."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        hidden, ffn = shape.hidden_size, shape.ffn_size
        self.deviation, self.active_share = residual_deviation(shape), shape.top_k / shape.experts
        self.gate = nn.Parameter(torch.empty(shape.experts * ffn, hidden))
        self.up = nn.Parameter(torch.empty(shape.experts * ffn, hidden))
        self.down = nn.Parameter(torch.empty(shape.experts * hidden, ffn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As those of a dense feed-forward part."""
        nn.init.normal_(self.gate, std=DEVIATION)
        nn.init.normal_(self.up, std=DEVIATION)
        nn.init.normal_(self.down, std=self.deviation)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Also where there are no rows, of one expert or of all: their gradients are zeros then, not missing."""
        hidden = F.silu(grouped_linear(rows, self.gate, counts)) * grouped_linear(rows, self.up, counts)
        return grouped_linear(hidden, self.down, counts)


def grouped_linear(rows: Tensor, stacked: Tensor, counts: Tensor) -> Tensor:
    """rows [n, in], counts[e] of them for expert e, and its weights stacked [experts * out, in] -> [n, out].

    On CUDA one grouped product, which needs rows of a multiple of 16 bytes and never waits for the counts. On the CPU,
    where torch's is a loop as well and takes longer (benchmarks/LOG.md), a product for each expert.
    """
    weights = stacked.view(counts.numel(), -1, stacked.shape[1])
    if rows.is_cuda:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    parts = zip(torch.split(rows, numbers_of(counts, len(rows))), weights.unbind(), strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def times_chosen(chosen: Tensor, experts: int) -> Tensor:
    """int64 [experts] of int64 [n, top_k]. A GPU is not waited for, as it is by `bincount`."""
    flat = chosen.flatten()
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def numbers_of(counts: Tensor, total: int) -> list[int]:
    """int64 [n] that sum to `total`, read from the device. A fake tensor has no numbers: of one, as even as can be."""
    if counts.untyped_storage().device.type != "meta":
        return counts.tolist()
    n = len(counts)
    return [total * (each + 1) // n - total * each // n for each in range(n)]


def added_of(model: nn.Module) -> Tensor | None:
    """What a model, or a part of one, adds to the loss of its last forward to balance its experts."""
    return model.balance_loss() if isinstance(model, MoE) else None


def with_added(loss: Tensor, model: nn.Module) -> Tensor:
    """`loss` and what `model` adds to it."""
    added = added_of(model)
    return loss if added is None else loss + added


def token_sums(scores: Tensor, counts: Tensor) -> Tensor:
    """fp32 [2, experts]: choices, and scores that sum to 1 for each token. scores fp32 [n, experts], counts int64
    [experts]."""
    return torch.stack((counts.float(), (scores / scores.sum(-1, keepdim=True)).sum(0)))


def balance_loss(sums: Tensor, top_k: int) -> Tensor:
    """experts * sum_e share_e * score_e, before its rate, of `token_sums`."""
    choices, scores = sums
    share = choices / choices.sum()
    mean_score = scores / (choices.sum() / top_k)
    of_all: Tensor = choices.numel() * (share * mean_score).sum()
    return of_all


class _Counted(torch.autograd.Function):
    """weights themselves; their backward adds `counts` to `load`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        ctx.counts, ctx.load = counts, load
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.load.add_(ctx.counts)
        return grads[0], None, None


class _Together(torch.autograd.Function):
    """Two tensors themselves, with one backward, which runs when both gradients are there."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.view_as(a), b.view_as(b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[1]
