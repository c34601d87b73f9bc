"""dzero: the ZeRO family as DTensor placements. See README.md for the five lines a training loop needs.

Names are imported when they are first used: the command line reads its settings without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dzero.mesh import make_mesh
    from dzero.optim.adamw import AdamW
    from dzero.parallel.expert.dispatch import parallelize_experts
    from dzero.parallel.tensor.parallelize import parallelize
    from dzero.zero.config import PrecisionConfig, ZeroConfig
    from dzero.zero.offload_config import OffloadConfig
    from dzero.zero.shard import Sharded, shard

__version__ = "0.1.0"
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
_HOMES = {
    "AdamW": "dzero.optim.adamw",
    "OffloadConfig": "dzero.zero.offload_config",
    "PrecisionConfig": "dzero.zero.config",
    "Sharded": "dzero.zero.shard",
    "ZeroConfig": "dzero.zero.config",
    "make_mesh": "dzero.mesh",
    "parallelize": "dzero.parallel.tensor.parallelize",
    "parallelize_experts": "dzero.parallel.expert.dispatch",
    "shard": "dzero.zero.shard",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'dzero' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
