"""Llama decoder in plain PyTorch: RMSNorm, rotary positions, SwiGLU, grouped-query attention.

    embedding -> layers[i]: x + attention(norm(x)), x + ffn(norm(x)) -> norm -> head

Note: initial values. Every module that owns parameters has `reset_parameters()`, which draws them in place from the
default generator. So a model on the meta device can be filled module by module, in any order
(`meta_init.MetaInitializer`). Weights are normal with standard deviation 0.02. The two projections of each block that
write to the residual stream divide it by sqrt(2 * layers), so that the variance of the stream does not grow with depth
(GPT-2). Norm weights start at 1.

Note: rotary positions. Angles are computed in fp32 in each forward and are not stored, so there is no buffer to fill on
the meta device. Dim i of a head is rotated with dim i + head_dim / 2, as in the published Llama weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dzero.models.config import LlamaShape

DEVIATION = 0.02


class Llama(nn.Module):
    """Llama decoder: tokens int64 [batch, time] -> logits [batch, time, vocab] in the parameters' dtype.

    `ffn` makes the feed-forward module of each block, by default a SwiGLU.
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
        """Product heads * head_dim, summed over the layers."""
        return self.shape.layers * self.shape.hidden_size

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding, which is only used by calling it (see `zero/units.py`)."""
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        """Return the head, which is only used by calling it."""
        return self.head

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return the logits; arguments and errors are those of `features`."""
        logits: Tensor = self.head(self.features(tokens, positions))
        return logits

    def features(self, tokens: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return the input of the head [batch, time, hidden]; call it only inside the model's forward.

        Args:
            tokens: Token ids, int64 [batch, time].
            positions: Positions of the tokens in their sequences, int64 [time]. None: 0, 1, 2, ... With `max_tokens`
                they should be on the CPU, since the largest is read. Or int64 [batch, time], where sequences hold
                several documents: each begins at position 0, and tokens attend only within their document.
            mask: Keys that each query attends to, bool, in a shape that goes with [batch, heads, queries, keys]. None:
                those that follow from `positions`.

        Raises:
            ValueError: If a sequence is longer than `max_tokens`.
        """
        time, limit = tokens.shape[1], self.shape.max_tokens
        if limit is not None:
            length = time if positions is None or positions.ndim == 2 else int(positions.max()) + 1
            if length > limit:
                raise ValueError(
                    f"a sequence of {length} tokens: model.max_tokens={limit}; shorten the sequences or raise it"
                )
        positions = torch.arange(time, device=tokens.device) if positions is None else positions.to(tokens.device)
        cos, sin = rotary_tables(positions, self.shape.head_dim, self.shape.rope_theta)
        if mask is None and positions.ndim == 2:
            mask = within_documents(positions)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin, mask=mask)
        features: Tensor = self.norm(x)
        return features


class Block(nn.Module):
    """Transformer block: x [batch, time, hidden] -> same shape and dtype as x.

    cos and sin are those of `rotary_tables`, and `mask` that of `within_documents` or None. The feed-forward module
    `ffn` keeps the shape of its input.
    """

    def __init__(self, shape: LlamaShape, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.ffn_norm = nn.RMSNorm(shape.hidden_size, eps=shape.norm_eps)
        self.ffn = ffn

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply attention, then the feed-forward module, each to the normalized input and added to the input."""
        x = x + self.attention(self.attention_norm(x), cos, sin, mask=mask)
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions. Inputs and outputs have the shapes of `Block`."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.grouped = shape.kv_heads != shape.heads
        self.query = Linear(shape.hidden_size, shape.heads * shape.head_dim)
        self.key = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.value = Linear(shape.hidden_size, shape.kv_heads * shape.head_dim)
        self.out = Linear(shape.heads * shape.head_dim, shape.hidden_size, deviation=residual_deviation(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend from each position to itself and all earlier ones; queries and keys are rotated, values are not."""
        query = rotate(self._heads(self.query(x)), cos, sin)
        key = rotate(self._heads(self.key(x)), cos, sin)
        value = self._heads(self.value(x))
        out: Tensor = self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the attention output, in the shape of `query`.

        Args:
            query: Rotated queries [batch, heads, time, head_dim].
            key: Rotated keys [batch, kv_heads, time, head_dim].
            value: Values [batch, kv_heads, time, head_dim].
            mask: Keys that each query attends to, bool [batch, 1, time, time]. None: its own and all earlier ones.
        """
        causal = mask is None
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=self.grouped)

    def _heads(self, x: Tensor) -> Tensor:
        """Split heads: [batch, time, heads * head_dim] -> [batch, heads, time, head_dim]."""
        batch, time, _ = x.shape
        return x.view(batch, time, -1, self.head_dim).transpose(1, 2)


class SwiGLU(nn.Module):
    """Feed-forward layer down(silu(gate(x)) * up(x)), with `width` inner features: [..., hidden] -> [..., hidden]."""

    def __init__(self, shape: LlamaShape, width: int | None = None) -> None:
        super().__init__()
        width = width or shape.ffn_size
        self.gate = Linear(shape.hidden_size, width)
        self.up = Linear(shape.hidden_size, width)
        self.down = Linear(width, shape.hidden_size, deviation=residual_deviation(shape))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to each position."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Linear(nn.Linear):
    """Linear layer without bias, initialized with standard deviation `deviation`."""

    def __init__(self, inputs: int, outputs: int, *, deviation: float = DEVIATION) -> None:
        self.deviation = deviation  # before nn.Linear's constructor, which calls reset_parameters
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution with mean 0."""
        nn.init.normal_(self.weight, std=self.deviation)


class Embedding(nn.Embedding):
    """Embedding initialized with standard deviation `DEVIATION`."""

    def reset_parameters(self) -> None:
        """Draw the weight from a normal distribution with mean 0; nn.Embedding itself uses deviation 1."""
        nn.init.normal_(self.weight, std=DEVIATION)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * theta ** (-2i / head_dim), in fp32.

    Their shape is [time, head_dim / 2] for positions [time], and [batch, 1, time, head_dim / 2] for [batch, time].
    """
    powers = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float().unsqueeze(-1) * theta**-powers
    if positions.ndim == 2:
        angles = angles.unsqueeze(1)  # the same for all heads
    return angles.cos(), angles.sin()


def within_documents(positions: Tensor) -> Tensor:
    """Return which keys each query attends to, bool [batch, 1, time, time]: those before it in its own document.

    A document begins at each 0 of `positions`, int64 [batch, time].
    """
    document = (positions == 0).cumsum(1)
    same = document.unsqueeze(2) == document.unsqueeze(1)
    return same.tril().unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [batch, heads, time, head_dim] by its positions in fp32; round once to x's dtype."""
    left, right = x.float().chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


def residual_deviation(shape: LlamaShape) -> float:
    """Return the standard deviation of weights that write to the residual stream."""
    return DEVIATION / math.sqrt(2 * shape.layers)
