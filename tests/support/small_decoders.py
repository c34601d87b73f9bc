"""Small decoders for the tests, one per kind of trouble, with seeded batches.

    even      every dim of every parameter is a multiple of 4
    uneven    every dim is odd; a parameter of each block and one of the root have a first dim of 1, so that at
              2 and 4 ranks shards are padded, short, or empty
    tied      embedding and head are one parameter
    frozen    the position table, the first norm of block 0 and the whole of block 1 do not train

Blocks are in `layers`. `forward(tokens)`: int64 [batch, time] -> logits [batch, time, vocab] in the parameters'
dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MAX_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a decoder. `gains`: parameters of shape [1, width] in each block and [1] before the head."""

    vocab: int
    width: int
    heads: int
    hidden: int
    layers: int = 3
    gains: bool = False
    tied: bool = False
    frozen: bool = False


SHAPES = {
    "even": Shape(vocab=64, width=32, heads=4, hidden=64),
    "uneven": Shape(vocab=37, width=15, heads=3, hidden=21, gains=True),
    "tied": Shape(vocab=64, width=32, heads=4, hidden=64, tied=True),
    "frozen": Shape(vocab=64, width=32, heads=4, hidden=64, frozen=True),
}


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width)
        self.norm2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, shape.hidden)
        self.down = nn.Linear(shape.hidden, shape.width)
        self.gain = nn.Parameter(torch.ones(1, shape.width)) if shape.gains else None

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        batch, time, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        y: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + (y if self.gain is None else y * self.gain)


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.width)
        self.position = nn.Embedding(MAX_TOKENS, shape.width)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.gain = nn.Parameter(torch.ones(1)) if shape.gains else None
        self.head = nn.Linear(shape.width, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.layers:
            x = block(x)
        x = self.norm(x) if self.gain is None else self.norm(x) * self.gain
        logits: Tensor = self.head(x)
        return logits


def build(kind: str, seed: int = 0, layers: int | None = None) -> Decoder:
    """An fp32 decoder of a kind in `SHAPES`: the same bits for the same seed; torch's own generator is kept.

    layers: as many instead of the kind's.
    """
    shape = SHAPES[kind] if layers is None else replace(SHAPES[kind], layers=layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(shape)
        with torch.no_grad():
            model.embed.weight.mul_(0.3)
            model.position.weight.mul_(0.3)
    if shape.frozen:
        for module in (model.position, model.layers[0].get_submodule("norm1"), model.layers[1]):
            module.requires_grad_(False)
    return model


def batches(
    kind: str, *, steps: int, ranks: int, microbatches: int, samples: int = 2, tokens: int = 12, seed: int = 0
) -> list[list[list[Tensor]]]:
    """`[step][rank][microbatch]`: int64 [samples, tokens + 1], each row counting in strides from a random start."""
    vocab = SHAPES[kind].vocab
    generator = torch.Generator().manual_seed(seed)
    shape = (steps, ranks, microbatches, samples, 1)
    start = torch.randint(vocab, shape, generator=generator)
    stride = torch.randint(1, 4, shape, generator=generator)
    drawn = (start + stride * torch.arange(tokens + 1)) % vocab
    return [[list(of_rank) for of_rank in of_step] for of_step in drawn]


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """Mean next-token cross entropy of int64 [samples, tokens + 1], in fp32, in nats."""
    logits: Tensor = model(batch[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
