"""ZeRO stages 0 to 3 with offload, as DTensor placements on PyTorch's FSDP2.

    sharded = dzero.shard(model, stage=3, offload="host")      # any nn.Module, in place, over all ranks
    optim = dzero.AdamW(sharded, lr=3e-4, max_norm=1.0)
    for batch in batches:
        loss_of(sharded.model, batch).backward()
        optim.step()

Shard:         `shard`, `Sharded`, `ZeroConfig`, `PrecisionConfig`, `OffloadConfig`, `DiskConfig`, `ModelInit`,
               `empty_init`
Cut a model:   `make_mesh`, `take_mesh`, `parallelize`, `ParallelConfig`, `ParallelModel`, `Pipeline`, `PipelinePlan`,
               `HiddenStates`, `BiasUpdate`, `tile`, `tile_loss`
Optimize:      `AdamW`, `Muon`, `MuonConfig`, `TorchOptimizer`, `ScalerConfig`, `clip_grad_norm_`
Save, resume:  `Checkpointer`, `CheckpointConfig`, `DcpReader`, `describe`, `save_pretrained`, `weights`
Errors:        `RunError`, `CheckpointError`, `DiskError`, `OffloadError`

Everything here is stable from 0.2 on: it changes with a note in CHANGELOG.md, and what is renamed keeps its old name,
with a warning, for one minor release. Everything else in the package may change at any time. Names are imported when
they are first used, so that the command line reads its settings without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dzero.utils.library_logs import leave_out

if TYPE_CHECKING:
    from dzero.checkpoint.checkpointer import Checkpointer
    from dzero.checkpoint.config import CheckpointConfig
    from dzero.checkpoint.dcp import DcpReader
    from dzero.checkpoint.errors import CheckpointError
    from dzero.checkpoint.save_pretrained import save_pretrained
    from dzero.checkpoint.weights import weights
    from dzero.errors import RunError
    from dzero.mesh import make_mesh, take_mesh
    from dzero.models.published import describe
    from dzero.offload.executor import OffloadError
    from dzero.optim.adamw import AdamW
    from dzero.optim.config import MuonConfig
    from dzero.optim.loss_scaler import ScalerConfig
    from dzero.optim.muon import Muon
    from dzero.optim.torch_optimizer import TorchOptimizer
    from dzero.optim.total_norm import clip_grad_norm_
    from dzero.parallel.expert.bias import BiasUpdate
    from dzero.parallel.parallelize import ParallelConfig, ParallelModel, parallelize
    from dzero.parallel.pipeline.run import Pipeline
    from dzero.parallel.pipeline.schedule import HiddenStates
    from dzero.parallel.pipeline.split import PipelinePlan
    from dzero.parallel.tiling.loss import tile_loss
    from dzero.parallel.tiling.tile import tile
    from dzero.utils.scratch_paths import DiskError
    from dzero.zero.config import PrecisionConfig, ZeroConfig
    from dzero.zero.empty_init import empty_init
    from dzero.zero.offload_config import DiskConfig, OffloadConfig
    from dzero.zero.shard import ModelInit, shard
    from dzero.zero.sharded import Sharded

__version__ = "0.1.0"
_MODULES = {
    "AdamW": "dzero.optim.adamw",
    "BiasUpdate": "dzero.parallel.expert.bias",
    "CheckpointConfig": "dzero.checkpoint.config",
    "CheckpointError": "dzero.checkpoint.errors",
    "Checkpointer": "dzero.checkpoint.checkpointer",
    "DcpReader": "dzero.checkpoint.dcp",
    "DiskConfig": "dzero.zero.offload_config",
    "DiskError": "dzero.utils.scratch_paths",
    "HiddenStates": "dzero.parallel.pipeline.schedule",
    "ModelInit": "dzero.zero.shard",
    "Muon": "dzero.optim.muon",
    "MuonConfig": "dzero.optim.config",
    "OffloadConfig": "dzero.zero.offload_config",
    "OffloadError": "dzero.offload.executor",
    "ParallelConfig": "dzero.parallel.parallelize",
    "ParallelModel": "dzero.parallel.parallelize",
    "Pipeline": "dzero.parallel.pipeline.run",
    "PipelinePlan": "dzero.parallel.pipeline.split",
    "PrecisionConfig": "dzero.zero.config",
    "RunError": "dzero.errors",
    "ScalerConfig": "dzero.optim.loss_scaler",
    "Sharded": "dzero.zero.sharded",
    "TorchOptimizer": "dzero.optim.torch_optimizer",
    "ZeroConfig": "dzero.zero.config",
    "clip_grad_norm_": "dzero.optim.total_norm",
    "describe": "dzero.models.published",
    "empty_init": "dzero.zero.empty_init",
    "make_mesh": "dzero.mesh",
    "parallelize": "dzero.parallel.parallelize",
    "save_pretrained": "dzero.checkpoint.save_pretrained",
    "shard": "dzero.zero.shard",
    "take_mesh": "dzero.mesh",
    "tile": "dzero.parallel.tiling.tile",
    "tile_loss": "dzero.parallel.tiling.loss",
    "weights": "dzero.checkpoint.weights",
}
__all__ = [
    "AdamW",
    "BiasUpdate",
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "DcpReader",
    "DiskConfig",
    "DiskError",
    "HiddenStates",
    "ModelInit",
    "Muon",
    "MuonConfig",
    "OffloadConfig",
    "OffloadError",
    "ParallelConfig",
    "ParallelModel",
    "Pipeline",
    "PipelinePlan",
    "PrecisionConfig",
    "RunError",
    "ScalerConfig",
    "Sharded",
    "TorchOptimizer",
    "ZeroConfig",
    "clip_grad_norm_",
    "describe",
    "empty_init",
    "make_mesh",
    "parallelize",
    "save_pretrained",
    "shard",
    "take_mesh",
    "tile",
    "tile_loss",
    "weights",
]

leave_out()


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _MODULES:
        raise AttributeError(f"module 'dzero' has no attribute {name!r}; it has {__all__}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
