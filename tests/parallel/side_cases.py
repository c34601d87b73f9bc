"""Sides of benchmarks/parallel.py for the pool's workers, on a model that is tiny."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dzero.models.config import LlamaShape, MoEShape
from dzero.models.llama import Llama
from dzero.models.moe import MoE

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
SIZES: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 4}
STEPS = 4


def losses_of(rank: int, ranks: int, name: str) -> list[float]:
    """Of each step of a side, as this rank tells them."""
    if BENCHMARKS not in sys.path:
        sys.path.append(BENCHMARKS)
    import parallel_sides

    torch.manual_seed(0)
    mixture = parallel_sides.SIDES[name].cut.ep > 1
    model: nn.Module = (
        MoE(MoEShape(**SIZES, ffn_size=16, experts=4, top_k=2, balance="none"))
        if mixture
        else Llama(LlamaShape(**SIZES, ffn_size=64))
    )
    step = parallel_sides.build(name, model, samples=4)
    generator = torch.Generator().manual_seed(parallel_sides.reader_of(name, rank))
    batch = torch.randint(0, 256, (4, 33), generator=generator)
    return [float(step(batch)) for _ in range(STEPS)]
