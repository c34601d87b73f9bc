"""Mixture of experts in plain PyTorch: the decoder of `models/llama.py`, with a few of many SwiGLUs for each token.

    router -> the top_k experts of each token, and their weights: scores normalized to sum 1 (top_k=1: the score itself)
    tokens sorted by expert -> experts: one SwiGLU for each run of tokens -> weighted sum (+ shared SwiGLU)

No token is dropped, and experts have no capacity. The weights of experts are stacked along dim 0: gate and up
[experts * ffn, hidden], down [experts * hidden, ffn]. They have two dims, not three, because ZeRO shards dim 0, which
then has enough rows for any number of ranks, however few the experts.

Note: load balancing. If only the loss decides, all tokens choose the same few experts.

    auxiliary-loss-free   A bias per expert is added to the scores for the choice of experts, but not to the weights.
                          After each step  bias += rate * sign(mean load - load)  (DeepSeek-V3, section 2.1.2). The load
                          of an expert is how often it was chosen in all microbatches on all ranks of that step.
    loss                  rate * experts * sum_e share_e * score_e  is added to the loss for each layer (Switch
                          Transformer, eq. 4). share_e is the share of choices that expert e received, score_e its mean
                          score, over one microbatch of one rank; ranks of a tp group share theirs. The sum is 1 * rate
                          if all experts are chosen equally often. A product of two means is not the mean of products,
                          so another number of ranks or microbatches makes another loss of the same data.
    none                  No balancing.

Loads are counted in backward: once for each microbatch, even if its forward is recomputed, and never in evaluation.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dzero.models.config import MoEShape
from dzero.models.llama import DEVIATION, Llama, SwiGLU, residual_deviation


class MoE(Llama):
    """Decoder with experts: tokens int64 [batch, time] -> logits [batch, time, vocab], in the parameters' dtype."""

    shape: MoEShape

    def __init__(self, shape: MoEShape) -> None:
        super().__init__(shape, lambda: Mixture(shape))

    def features(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the input of the head as `Llama.features` does; `balance_loss` then refers to these tokens."""
        for mixture in self._mixtures():
            mixture.loss = None
        return super().features(tokens, positions, mask)

    def balance_loss(self) -> Tensor | None:
        """Return the balancing loss of the last forward, fp32 scalar, summed over the layers; None if there is none."""
        losses = [mixture.loss for mixture in self._mixtures() if mixture.loss is not None]
        return torch.stack(losses).sum() if losses else None

    def _mixtures(self) -> list[Mixture]:
        return [module for module in self.modules() if isinstance(module, Mixture)]


class Mixture(nn.Module):
    """Feed-forward module of a block, x [batch, time, hidden] -> same shape: weighted sum of each token's experts.

    Attributes:
        loss: Balancing loss of the last forward; see the module's note.
    """

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.top_k, self.loss_rate = shape.top_k, shape.rate if shape.balance == "loss" else 0.0
        self.router = Router(shape)
        self.experts = Experts(shape)
        self.shared = SwiGLU(shape, shape.shared_experts * shape.ffn_size) if shape.shared_experts else None
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the router and the experts to each token; add the shared SwiGLU if there is one."""
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
        """Return sums over all tokens of the loss; replaced if other ranks have some of the tokens."""
        return sums

    def _with_loss(self, out: Tensor, loss: Tensor) -> Tensor:
        """Attach the loss to `out`; its backward waits for that of `out`, in which FSDP2 gathers the parameters."""
        out, loss = _Together.apply(out, loss)  # type: ignore[no-untyped-call]
        if self.loss is None:  # otherwise this is the recomputation in backward
            self.loss = loss
        return out


class Router(nn.Module):
    """Router that chooses the experts of each token.

    Attributes:
        bias: Bias of the choice, fp32 [experts]. None without auxiliary-loss-free balancing.
        load: Choices of each expert on this rank since the last `rebalance`, int64 [experts]. None without bias.
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
        """Draw the weight as that of any projection; set the bias to 0."""
        nn.init.normal_(self.weight, std=DEVIATION)
        for buffer in (self.bias, self.load):
            if buffer is not None:
                buffer.zero_()

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Choose experts: tokens [n, hidden] -> scores fp32 [n, experts], weights fp32 and experts int64 [n, top_k]."""
        logits = F.linear(tokens.float(), self.weight.float())
        scores = logits.softmax(-1) if self.softmax else logits.sigmoid()
        preferred = scores if self.bias is None else scores + self.bias
        chosen = preferred.detach().topk(self.top_k, dim=-1, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.top_k > 1:  # a single expert would always have weight 1, and the router no gradient
            weights = weights / weights.sum(-1, keepdim=True)
        return scores, weights, chosen

    @torch.no_grad()
    def rebalance(self, load: Tensor) -> None:
        """Update the bias once from the `load` of a step on all ranks, int64 [experts], and reset this rank's own."""
        assert self.bias is not None
        assert self.load is not None
        above = load * load.numel() - load.sum()  # integers, so that a load equal to the mean gives exactly 0
        self.bias -= self.rate * above.sign()
        self.load.zero_()


class Experts(nn.Module):
    """Stacked SwiGLUs: rows [n, hidden] sorted by expert, and the number of rows of each [experts] -> [n, hidden]."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        hidden, ffn = shape.hidden_size, shape.ffn_size
        self.deviation, self.active_share = residual_deviation(shape), shape.top_k / shape.experts
        self.gate = nn.Parameter(torch.empty(shape.experts * ffn, hidden))
        self.up = nn.Parameter(torch.empty(shape.experts * ffn, hidden))
        self.down = nn.Parameter(torch.empty(shape.experts * hidden, ffn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as those of a dense SwiGLU."""
        nn.init.normal_(self.gate, std=DEVIATION)
        nn.init.normal_(self.up, std=DEVIATION)
        nn.init.normal_(self.down, std=self.deviation)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply each expert to its rows; without rows, the gradients of an expert are zeros, not missing."""
        hidden = F.silu(grouped_linear(rows, self.gate, counts)) * grouped_linear(rows, self.up, counts)
        return grouped_linear(hidden, self.down, counts)


def grouped_linear(rows: Tensor, stacked: Tensor, counts: Tensor) -> Tensor:
    """Multiply each expert's rows by its weights: rows [n, in] -> [n, out].

    On CUDA this is one grouped matmul, which needs rows of a multiple of 16 bytes and does not wait for the counts. On
    the CPU it is one matmul per expert: torch's grouped matmul is a loop there too, and slower (benchmarks/LOG.md).
    The rows are sorted by expert; `stacked` is [experts * out, in], and `counts` the rows of each, int64 [experts].
    """
    weights = stacked.view(counts.numel(), -1, stacked.shape[1])
    if rows.is_cuda:
        return F.grouped_mm(rows, weights.transpose(1, 2), offs=counts.cumsum(0, dtype=torch.int32))
    parts = zip(torch.split(rows, numbers_of(counts, len(rows))), weights.unbind(), strict=True)
    return torch.cat([F.linear(part, weight) for part, weight in parts])


def times_chosen(chosen: Tensor, experts: int) -> Tensor:
    """Count how often each expert occurs in int64 [n, top_k]; unlike `bincount`, does not wait for a GPU."""
    flat = chosen.flatten()
    return flat.new_zeros(experts).scatter_add_(0, flat, torch.ones_like(flat))


def numbers_of(counts: Tensor, total: int) -> list[int]:
    """Read int64 counts [n] that sum to `total` from the device; split `total` evenly for a fake tensor."""
    if counts.untyped_storage().device.type != "meta":
        return counts.tolist()
    n = len(counts)
    return [total * (each + 1) // n - total * each // n for each in range(n)]


def added_of(model: nn.Module) -> Tensor | None:
    """Return the balancing loss of the last forward of a model or pipeline stage; None if there is none."""
    return model.balance_loss() if isinstance(model, MoE) else None


def with_added(loss: Tensor, model: nn.Module) -> Tensor:
    """Return `loss` plus the balancing loss of `model`."""
    added = added_of(model)
    return loss if added is None else loss + added


def token_sums(scores: Tensor, counts: Tensor) -> Tensor:
    """Return fp32 [2, experts]: the choices, and the sum over tokens of scores normalized to 1 for each token.

    `scores` are fp32 [n, experts], and `counts` the choices, int64 [experts].
    """
    return torch.stack((counts.float(), (scores / scores.sum(-1, keepdim=True)).sum(0)))


def balance_loss(sums: Tensor, top_k: int) -> Tensor:
    """Return experts * sum_e share_e * score_e from `token_sums`, not yet multiplied by its rate."""
    choices, scores = sums
    share = choices / choices.sum()
    mean_score = scores / (choices.sum() / top_k)
    of_all: Tensor = choices.numel() * (share * mean_score).sum()
    return of_all


class _Counted(torch.autograd.Function):
    """Identity of `weights`; its backward adds `counts` to `load`."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, counts: Tensor, load: Tensor) -> Tensor:
        ctx.counts, ctx.load = counts, load
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        ctx.load.add_(ctx.counts)
        return grads[0], None, None


class _Together(torch.autograd.Function):
    """Identity of two tensors with one common backward, which runs when both gradients are available."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.view_as(a), b.view_as(b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[1]
