"""Models on the meta device: `build` makes shapes only, whatever the size of the model.

`meta_init.MetaInitializer` fills a model afterwards, module by module.
"""

from __future__ import annotations

import torch
from torch import nn

from dzero.models.config import ModelConfig, MoEShape
from dzero.models.hf import build_hf
from dzero.models.llama import Llama
from dzero.models.meta_init import MetaInitializer
from dzero.models.moe import MoE
from dzero.models.tensor_views import Readable
from dzero.models.weights import local_weights


def build(config: ModelConfig, vocab_size: int | None = None) -> nn.Module:
    """Return the decoder on the meta device, in fp32: tokens int64 [batch, time] -> logits [batch, time, vocab].

    A model that does not set its own vocabulary takes that of the data, `vocab_size`; a smaller one is an error.
    """
    if config.kind == "hf":
        assert config.name_or_path is not None
        return build_hf(config.name_or_path, vocab_size)
    with torch.device("meta"):
        shape = config.shape(vocab_size)
        return MoE(shape) if isinstance(shape, MoEShape) else Llama(shape)


def materialiser(config: ModelConfig, model: nn.Module, *, seed: int, device: torch.device | str) -> MetaInitializer:
    """Return the initializer of a model from `build(config)`: random values, or the tensors in `config.weights`.

    The initializer reads whole tensors on every rank. For sharded models, `checkpoint/import_hf.py` reads only the
    elements that a rank keeps.
    """
    return MetaInitializer(model, seed=seed, device=device, weights=weights_of(config, model))


def weights_of(config: ModelConfig, model: nn.Module) -> dict[str, Readable]:
    """Return the stored tensors that `model` starts from, by name in the model; empty for random values."""
    return {} if config.weights_folder is None else local_weights(config.weights_folder, model)


def count(model: nn.Module) -> int:
    """Return the number of elements of all parameters; tied ones count once, sharded ones with their global shape."""
    return sum(param.numel() for param in model.parameters())


def flops_per_token(model: nn.Module, sequence_tokens: int) -> float | None:
    """Return the model FLOPs of forward and backward per trained token, for MFU; one multiply-add counts as 2.

        6 * matmul_elems + 12 * attention_width * sequence_tokens

    matmul_elems: Elements of the parameters with at least 2 dims, except lookup tables (`nn.Embedding`). A tied head
    counts. Each element costs 2 FLOPs in forward and 4 in backward, 2 of them for the parameter's gradient, which a
    frozen parameter does not have. Expert parameters count in proportion to the experts that a token uses
    (`active_share` of their module).
    attention_width: heads * head_dim, summed over the layers. Queries times keys and scores times values cost
    4 * attention_width * sequence_tokens in forward and twice that in backward.

    This is the convention of PaLM (appendix B): all sequence_tokens² pairs count, although the causal mask needs half
    of them, and recomputation does not count. Experts of transformers models all count as active.

    Returns:
        None if the model has no `attention_width`; MFU is unknown then.
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
    of_params = sum(
        share * param.numel() * (6.0 if param.requires_grad else 4.0)
        for param, share in multiplied.items()
        if param.ndim >= 2
    )
    return of_params + 12.0 * int(attention_width) * sequence_tokens
