"""Model, data and settings of the runs that DeepSpeed and dzero are compared in."""

from __future__ import annotations

from typing import Any

import torch

LR, BETAS, DECAY = 1e-2, (0.9, 0.98), 0.01
SAVED, STEPS = 6, 18
VOCAB, SEQUENCES, TOKENS = 32, 4, 12


def config() -> Any:
    import transformers

    return transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=13,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )


def batch(step: int, rank: int, ranks: int) -> torch.Tensor:
    """Tokens of a rank in a step, int64 [sequences, tokens]."""
    random = torch.Generator().manual_seed(1000 + step)
    each = SEQUENCES // ranks
    return torch.randint(0, VOCAB, (SEQUENCES, TOKENS), generator=random)[rank * each : (rank + 1) * each]
