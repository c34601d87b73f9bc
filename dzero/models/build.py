"""From a config to a model without values: `build` makes it on meta, shapes only, whatever its size.

`materialise.Materialiser` fills it afterwards, part by part.
"""

from __future__ import annotations

import torch
from torch import nn

from dzero.models.config import ModelConfig
from dzero.models.hf import build_hf
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.models.moe import MoE
from dzero.models.safetensors_reader import StoredTensor
from dzero.models.shapes import MoEShape
from dzero.models.weights import local_weights


def build(config: ModelConfig, vocab_size: int | None = None) -> nn.Module:
    """The decoder on meta, in fp32: tokens int64 [batch, time] -> logits [batch, time, vocab].

    vocab_size: ids of the data. Raises ValueError where it exceeds the model's vocabulary.
    """
    if config.kind == "hf":
        assert config.name_or_path is not None
        return build_hf(config.name_or_path, vocab_size)
    with torch.device("meta"):
        shape = config.shape(vocab_size)
        return MoE(shape) if isinstance(shape, MoEShape) else Llama(shape)


def materialiser(config: ModelConfig, model: nn.Module, *, seed: int, device: torch.device | str) -> MetaInitializer:
    """What fills the `model` that `build(config)` made: random values, or a folder's where `config.weights` names one.

    Every rank reads whole tensors; where models are cut, `checkpoint.imports` reads only what a rank keeps.
    Raises FileNotFoundError or ValueError naming the weights that the folder lacks or holds in another shape.
    """
    return MetaInitializer(model, seed=seed, device=device, weights=weights_of(config, model))


def weights_of(config: ModelConfig, model: nn.Module) -> dict[str, StoredTensor]:
    """The stored tensors with which `model` starts, by its names; none for random values. Raises as `local_weights`."""
    return {} if config.weights_folder is None else local_weights(config.weights_folder, model)


def count(model: nn.Module) -> int:
    """Elements of all parameters, tied ones once, sharded ones whole."""
    return sum(param.numel() for param in model.parameters())


def flops_per_token(model: nn.Module, sequence_tokens: int) -> float | None:
    """Model FLOPs of forward and backward per trained token, for MFU; one multiply-add is 2.

        6 * matmul_elems + 12 * attention_width * sequence_tokens

    matmul_elems: elements of the parameters with ≥ 2 dims, tables that are only looked up (nn.Embedding) excepted; a
    tied head counts. Each costs 2 in forward and 4 in backward. Of experts the part that a token uses: a module's
    `active_share`.
    attention_width: heads * head_dim over all layers. Queries · keys and weights · values cost
    4 * attention_width * sequence_tokens in forward, twice that in backward.

    This is the convention of PaLM (appendix B): all sequence_tokens² pairs count although the causal mask needs half of
    them, and recomputation does not count. Experts of transformers all count as active. None, so that MFU is unknown,
    for a model that tells no attention_width.
    """
    attention_width = getattr(model, "attention_width", None)
    if attention_width is None:
        return None
    multiplied = {
        param: float(getattr(module, "active_share", 1.0))
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for param in module.parameters(recurse=False)
    }
    matmul_elems = sum(share * param.numel() for param, share in multiplied.items() if param.ndim >= 2)
    return 6.0 * matmul_elems + 12.0 * int(attention_width) * sequence_tokens
