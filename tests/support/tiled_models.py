"""What the tests of tiling run: llamas of odd sizes, untiled and in tiles, with the same values."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dzero import OffloadConfig, PrecisionConfig, Sharded, ZeroConfig, shard
from dzero.models.build import build, materialiser
from dzero.models.config import ModelConfig
from dzero.parallel.blocks import apply_blocks
from dzero.parallel.config import BlockConfig

VOCAB, LAYERS = 37, 2
Grads = dict[str, Tensor]


def llama(block: BlockConfig | None = None, *, tied: bool = False, seed: int = 0) -> nn.Module:
    """fp32, with values; 23 hidden features and 37 ids, both prime."""
    model, fill = on_meta(tied, seed)
    fill(model)
    apply_blocks(model, block or BlockConfig(), "cpu")
    return model


def on_meta(tied: bool = False, seed: int = 0) -> tuple[nn.Module, Any]:
    """The same without values, and what gives them."""
    config = ModelConfig(hidden_size=16, layers=LAYERS, heads=2, kv_heads=1, ffn_size=23, tied=tied)
    model = build(config, vocab_size=VOCAB)
    return model, materialiser(config, model, seed=seed, device="cpu")


def sharded_llama(
    block: BlockConfig | None = None,
    *,
    stage: int = 3,
    microbatches: int = 1,
    tied: bool = False,
    seed: int = 0,
    offload: OffloadConfig | None = None,
    **precision: Any,
) -> Sharded:
    """Cut over all ranks; values are drawn on the way."""
    model, fill = on_meta(tied, seed)
    apply_blocks(model, block or BlockConfig(), "cpu")
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
