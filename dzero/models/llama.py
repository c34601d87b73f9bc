"""A decoder of the Llama kind in plain torch: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    embedding -> layers[i]: x + attention(norm(x)), x + ffn(norm(x)) -> norm -> head

Note: initial values. Every module that owns parameters has `reset_parameters()`, which draws them in place from the
default generator, so a model built on meta is filled module by module, in any order (`build.Materialiser`). Weights
are normal with deviation 0.02; the two projections that write into the residual stream of each block are narrower by
sqrt(2 * layers), so that the stream's variance does not grow with depth (GPT-2). Norms start at 1.

Note: rotary positions are angles in fp32, computed in each forward and kept nowhere, so there is no buffer to lose
on meta. Dim i of a head turns together with dim i + head_dim / 2, as in the published Llama weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of the decoder; a head has hidden_size / heads dims, shared keys and values serve heads / kv_heads heads.

    `max_tokens`: longest sequence accepted (None: any). `tied`: embedding and head are one parameter.
    """

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    ffn_size: int
    max_tokens: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self) -> None:
        for key in ("vocab_size", "hidden_size", "layers", "heads", "kv_heads", "ffn_size", "max_tokens"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"model.{key}={value}: must be a whole number ≥ 1")
        for key in ("rope_theta", "norm_eps"):
            if not 0.0 < getattr(self, key) < math.inf:
                raise ValueError(f"model.{key}={getattr(self, key)}: must be a finite number > 0")
        if self.hidden_size % (2 * self.heads):
            raise ValueError(
                f"model.heads={self.heads} with model.hidden_size={self.hidden_size}: hidden_size / heads must be an "
                f"even whole number (rotary turns pairs of dims); allowed heads: {_divisors(self.hidden_size // 2)}"
                if self.hidden_size % 2 == 0
                else f"model.hidden_size={self.hidden_size}: must be even (rotary turns pairs of dims); "
                f"take {self.hidden_size + 1}"
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
                f"allowed: {_divisors(self.heads)}"
            )

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.heads


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


class Llama(nn.Module):
    """tokens int64 [batch, time] -> logits [batch, time, vocab] in the parameters' dtype."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.head = Linear(shape.hidden_size, shape.vocab_size)
        if shape.tied:
            self.head.weight = self.embedding.weight

    @property
    def attention_width(self) -> int:
        """heads * head_dim, summed over the layers."""
        return self.shape.layers * self.shape.hidden_size

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """positions: as for `features`. Raises ValueError when a sequence is longer than `max_tokens`."""
        logits: Tensor = self.head(self.features(tokens, positions))
        return logits

    def features(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """What the head reads: int64 [batch, time] -> [batch, time, hidden]. Call it inside the model's own forward.

        positions: of the tokens in their sequences, int64 [time], on the CPU (else it waits for the device); None for
        0, 1, 2, ...
        """
        time, limit = tokens.shape[1], self.shape.max_tokens
        if limit is not None:
            length = time if positions is None else int(positions.max()) + 1
            if length > limit:
                raise ValueError(
                    f"a sequence of {length} tokens: model.max_tokens={limit}; shorten the sequences or raise it"
                )
        positions = torch.arange(time, device=tokens.device) if positions is None else positions.to(tokens.device)
        cos, sin = rotary_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        features: Tensor = self.norm(x)
        return features


class Block(nn.Module):
    """x [batch, time, hidden], cos and sin fp32 [time, head_dim / 2] -> the same shape and dtype as x."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.ffn = SwiGLU(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention, then the feed-forward part, each normalised before and added to its input."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Attention(nn.Module):
    """Causal attention of `heads` queries over `kv_heads` keys and values. Shapes as in `Block`."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.grouped = shape.kv_heads != shape.heads
        self.query = Linear(shape.hidden_size, shape.heads * shape.head_dim)
        self.key = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.value = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.out = Linear(shape.heads * shape.head_dim, shape.hidden_size, deviation=_residual_deviation(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Each position sees itself and those before it; queries and keys are rotated, values are not."""
        query = rotate(self._heads(self.query(x)), cos, sin)
        key = rotate(self._heads(self.key(x)), cos, sin)
        value = self._heads(self.value(x))
        out: Tensor = self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [batch, heads, time, head_dim], key and value [batch, kv_heads, time, head_dim] -> query's shape."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.grouped)

    def _heads(self, x: Tensor) -> Tensor:
        """[batch, time, heads * head_dim] -> [batch, heads, time, head_dim]."""
        batch, time, _ = x.shape
        return x.view(batch, time, -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)); x [batch, time, hidden] -> the same."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate = Linear(shape.hidden_size, shape.ffn_size)
        self.up = Linear(shape.hidden_size, shape.ffn_size)
        self.down = Linear(shape.ffn_size, shape.hidden_size, deviation=_residual_deviation(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Each position by itself."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Linear(nn.Linear):
    """Without bias; drawn with `deviation`."""

    def __init__(self, inputs: int, outputs: int, *, deviation: float = DEVIATION) -> None:
        self.deviation = deviation  # first: the constructor of nn.Linear already draws
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Normal with mean 0; nn.Linear's own values are uniform, up to inputs ** -0.5."""
        nn.init.normal_(self.weight, std=self.deviation)


class Embedding(nn.Embedding):
    """Drawn with the usual deviation."""

    def reset_parameters(self) -> None:
        """Normal with mean 0 and DEVIATION; nn.Embedding's own has deviation 1."""
        nn.init.normal_(self.weight, std=DEVIATION)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """positions [time] -> cos and sin, fp32 [time, head_dim / 2], of position * theta ** (-2i / head_dim)."""
    powers = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = torch.outer(positions.float(), theta**-powers)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, time, head_dim] turned by its position, in fp32, rounded once to x's dtype."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def _residual_deviation(shape: LlamaShape) -> float:
    return DEVIATION / math.sqrt(2 * shape.layers)
