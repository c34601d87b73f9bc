"""dzero: the ZeRO family as DTensor placements. See README.md for the five lines a training loop needs."""

from dzero.mesh import make_mesh
from dzero.optim.adamw import AdamW
from dzero.parallel.experts import parallelize_experts
from dzero.parallel.tensor import parallelize
from dzero.zero.layout import PrecisionConfig, ZeroConfig
from dzero.zero.shard import Sharded, shard
from dzero.zero.tiers import OffloadConfig

__all__ = [
    "AdamW",
    "OffloadConfig",
    "PrecisionConfig",
    "Sharded",
    "ZeroConfig",
    "make_mesh",
    "parallelize",
    "parallelize_experts",
    "shard",
]
