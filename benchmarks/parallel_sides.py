"""Every factoring of four ranks, by the library and by hand: the same model, cuts and dtypes.

    side                 ranks         by
    dzero_3_dp4          dp 4          parallel_own.py: ZeroConfig(stage=3), AdamW with fp32 masters
    dzero_2_dp2.tp2      dp 2, tp 2    the same with parallelize before it
    hand_3_dp4           dp 4          parallel_hand.py: torch's fully_shard, fused AdamW on fp32 shards, bf16 compute
    hand_2_dp2.tp2       dp 2, tp 2    the same with parallelize_module before it

A stage means to those by hand: 3 frees a unit's parameters after forward, 1 and 2 keep them. Where dp x cp is 1 there
is nothing to shard, and stages are one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dzero.models.config import LlamaShape, MoEShape
from dzero.models.llama import Llama
from dzero.models.moe import MoE

RANKS = 4
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Factoring:
    """Degrees; ep is among the data-parallel ranks."""

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1

    def __str__(self) -> str:
        return ".".join(f"{axis}{degree}" for axis, degree in asdict(self).items() if degree > 1)

    @property
    def stages(self) -> tuple[int, ...]:
        """Of ZeRO. torch's pipelines reduce gradients once a step, as stage 1 does."""
        if self.dp * self.cp == 1:
            return (1,)
        return (1, 3) if self.pp > 1 else (2, 3)


FACTORINGS = [
    Factoring(dp=4),
    Factoring(dp=2, tp=2),
    Factoring(tp=4),
    Factoring(dp=2, cp=2),
    Factoring(cp=4),
    Factoring(cp=2, tp=2),
    Factoring(dp=2, pp=2),
    Factoring(cp=2, pp=2),
    Factoring(tp=2, pp=2),
    Factoring(pp=4),
    Factoring(dp=4, ep=2),
    Factoring(dp=4, ep=4),
]


@dataclass(frozen=True)
class Side:
    """by: `dzero` or `hand`."""

    by: str
    stage: int
    cut: Factoring

    @property
    def name(self) -> str:
        """As rows have it."""
        return f"{self.by}_{self.stage}_{self.cut}"


SIDES = {
    side.name: side
    for cut in FACTORINGS
    for side in (Side(by, stage, cut) for stage in cut.stages for by in ("dzero", "hand"))
}


def reader_of(name: str, rank: int) -> int:
    """Whose batches a rank reads: ranks are (pp, dp, cp, tp), and those of one dp read the same."""
    cut = SIDES[name].cut
    return rank // (cut.cp * cut.tp) % cut.dp


def warm_libraries(name: str) -> None:
    """Train a tiny model once, so that code pages, compiled kernels and library buffers precede the baseline."""
    sizes: dict[str, Any] = {"vocab_size": 256, "hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 4}
    if SIDES[name].cut.ep > 1:
        model: nn.Module = MoE(MoEShape(**sizes, ffn_size=16, experts=4, top_k=2, balance="none"))
    else:
        model = Llama(LlamaShape(**sizes, ffn_size=64))
    step = build(name, model, samples=4)
    step(torch.arange(33).repeat(4, 1))


def build(name: str, model: nn.Module, *, samples: int) -> Step:
    """The step function of a side: int64 [samples, tokens + 1] -> its mean loss, times pp on the last part's rank and 0
    on others, so that the mean over ranks is right. Call it on every rank of an initialised gloo group."""
    import parallel_hand
    import parallel_own

    side = SIDES[name]
    make = parallel_own.build if side.by == "dzero" else parallel_hand.build
    return make(model, side.stage, side.cut, samples)
