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
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dzero.models.shapes import LlamaShape

DEVIATION = 0.02


class Llama(nn.Module):
    """tokens int64 [batch, time] -> logits [batch, time, vocab] in the parameters' dtype.

    ffn: makes the feed-forward part of each block; None for a SwiGLU.
    """

    def __init__(self, shape: LlamaShape, ffn: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape, SwiGLU(shape) if ffn is None else ffn()) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.head = Linear(shape.hidden_size, shape.vocab_size)
        if shape.tied:
            self.head.weight = self.embedding.weight

    @property
    def attention_width(self) -> int:
        """heads * head_dim, summed over the layers."""
        return self.shape.layers * self.shape.hidden_size

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, which is used by calling it alone (zero/units.py)."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, which is used by calling it alone."""
        return self.head

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
    """x [batch, time, hidden], cos and sin fp32 [time, head_dim / 2] -> the same shape and dtype as x.

    ffn: the feed-forward part, x -> the same shape.
    """

    def __init__(self, shape: LlamaShape, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.ffn = ffn

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention, then the feed-forward part, each normalised before and added to its input."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Attention(nn.Module):
    """Causal attention of `heads` queries over `kv_heads` keys and values. Shapes as in `StripedBlock`."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.grouped = shape.kv_heads != shape.heads
        self.query = Linear(shape.hidden_size, shape.heads * shape.head_dim)
        self.key = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.value = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.out = Linear(shape.heads * shape.head_dim, shape.hidden_size, deviation=residual_deviation(shape))

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
    """down(silu(gate(x)) * up(x)); x [..., hidden] -> the same; `width` features between them, or ffn_size."""

    def __init__(self, shape: LlamaShape, width: int | None = None) -> None:
        super().__init__()
        width = width or shape.ffn_size
        self.gate = Linear(shape.hidden_size, width)
        self.up = Linear(shape.hidden_size, width)
        self.down = Linear(width, shape.hidden_size, deviation=residual_deviation(shape))

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


def residual_deviation(shape: LlamaShape) -> float:
    """Of weights that write into the residual stream."""
    return DEVIATION / math.sqrt(2 * shape.layers)
