"""What the tests of tiling run: llamas of odd sizes, untiled and in tiles, with the same values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import decoders
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dzero import OffloadConfig, PrecisionConfig, Sharded, ZeroConfig, shard

VOCAB, LAYERS = 37, 2
SIZES = {"hidden_size": 16, "layers": LAYERS, "heads": 2, "kv_heads": 1, "ffn_size": 23}
"""Vocabulary and hidden features are prime."""
Grads = dict[str, Tensor]


def llama(*, tied: bool = False, seed: int = 0, **block: Any) -> nn.Module:
    """In fp32, with values, and with settings `block.*`."""
    return decoders.in_blocks(decoders.with_values(VOCAB, seed=seed, tied=tied, **SIZES), **block)


def sharded_llama(
    block: Any = None,
    *,
    stage: int = 3,
    microbatches: int = 1,
    tied: bool = False,
    seed: int = 0,
    offload: OffloadConfig | None = None,
    **precision: Any,
) -> Sharded:
    """Cut over all ranks; values are drawn on the way. block: settings by name."""
    model = decoders.on_meta(VOCAB, tied=tied, **SIZES)
    fill = decoders.filling(model, seed=seed)
    decoders.in_blocks(model, **(block if isinstance(block, Mapping) else vars(block) if block else {}))
    kinds = PrecisionConfig(**{"param": "fp32", **precision})
    zero = ZeroConfig(stage=stage)
    return shard(model, zero, precision=kinds, offload=offload, microbatches=microbatches, init=fill)


def batch(seed: int = 3) -> tuple[Tensor, Tensor]:
    """Tokens and targets, int64 [2, 12]; three targets do not count."""
    drawn = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(seed))
    tokens, targets = drawn[:, :-1], drawn[:, 1:].clone()
    targets[0, :3] = -100
    return tokens, targets


def reference_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """From whole logits."""
    return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def grads_of(model: nn.Module) -> Grads:
    """By untiled names: where gradients are put in the parameters' places, the state dict joins them."""
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param.copy_(param.grad)
    return model.state_dict()


def assert_close(got: Grads, want: Grads, *, rtol: float, atol: float) -> None:
    assert [*got] == [*want]
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
