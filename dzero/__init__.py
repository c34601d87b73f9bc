"""dzero: the ZeRO family as DTensor placements. See README.md for the five lines a training loop needs."""

from dzero.mesh import make_mesh
from dzero.optim.adamw import AdamW
from dzero.parallel.context import parallelize_context
from dzero.parallel.experts import parallelize_experts
from dzero.parallel.parts import PipelinePlan, cut_parts
from dzero.parallel.pipeline import Hidden, Pipeline
from dzero.parallel.tensor import parallelize
from dzero.zero.layout import PrecisionConfig, ZeroConfig
from dzero.zero.shard import Sharded, shard
from dzero.zero.tiers import OffloadConfig

__all__ = [
    "AdamW",
    "Hidden",
    "OffloadConfig",
    "Pipeline",
    "PipelinePlan",
    "PrecisionConfig",
    "Sharded",
    "ZeroConfig",
    "cut_parts",
    "make_mesh",
    "parallelize",
    "parallelize_context",
    "parallelize_experts",
    "shard",
]
