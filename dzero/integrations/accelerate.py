"""Save and load a sharded model with the `save_state` and `load_state` of an `accelerate.Accelerator`.

    loader, schedule = accelerator.prepare(loader, schedule)
    checkpoint_with(accelerator, sharded, optim)
    accelerator.save_state(folder)      # on all ranks

accelerate has no registry of ways to shard: it saves a model and an optimizer by its own `DistributedType`, from the
first process. Its hooks are what it has for others. docs/guides/from_fsdp2.md says what else of it works.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dzero.checkpoint.checkpointer import Checkpointer
from dzero.checkpoint.config import CheckpointConfig
from dzero.errors import import_optional
from dzero.optim.base import MasterOptimizer
from dzero.zero.sharded import Sharded, check_sharded

accelerate: Any = import_optional("accelerate", "checkpoint_with", "hf")

OF_ITS_OWN = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
"""Kinds of `accelerate launch` for which accelerate shards, and saves, by itself."""
STATES = "dzero"
"""Folder of model and optimizer states in the folder of `save_state`."""


def checkpoint_with(accelerator: Any, sharded: Sharded, optim: MasterOptimizer) -> None:
    """Let `save_state` and `load_state` of an accelerator write and read the states of a sharded model, by shard.

    accelerate itself goes on saving the schedules, loaders, random states and registered objects.

    Args:
        accelerator: The `accelerate.Accelerator` of the loop.
        sharded: The sharded model.
        optim: Its optimizer, which `accelerator.prepare` has not wrapped: call `step` where
            `accelerator.sync_gradients` is true.

    Raises:
        ValueError: `accelerate launch` was told to shard by another library.
    """
    check_sharded(sharded, "checkpoint_with")
    if (kind := accelerator.distributed_type.name) in OF_ITS_OWN:
        raise ValueError(
            f"accelerate launch with {kind}: it would save a model that it did not shard; launch with --multi_gpu or "
            "--cpu, or with torchrun"
        )

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        _refuse_wrapped(accelerator, optim)
        _leave_out(sharded, models, weights)
        with Checkpointer(CheckpointConfig(folder=str(Path(folder) / STATES)), sharded, optim) as checkpoints:
            checkpoints.save(accelerator.save_iteration, {})

    def load(models: list[Any], folder: str) -> None:
        _refuse_wrapped(accelerator, optim)
        _leave_out(sharded, models, models)
        states = Path(folder) / STATES
        if not states.is_dir():
            raise ValueError(f"{folder}: no states of dzero ({STATES}/) are there; save_state after checkpoint_with()")
        with Checkpointer(CheckpointConfig(folder=str(states)), sharded, optim) as checkpoints:
            checkpoints.resume("auto", strict=True)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def _leave_out(sharded: Sharded, models: list[Any], parallel: list[Any]) -> None:
    """Remove from `parallel` what belongs to the sharded model, which may be among the prepared models."""
    for index in reversed([index for index, model in enumerate(models) if model is sharded.model]):
        del parallel[index]


def _refuse_wrapped(accelerator: Any, optim: MasterOptimizer) -> None:
    if any(each.optimizer is optim for each in accelerator._optimizers if hasattr(each, "optimizer")):
        raise ValueError(
            "accelerator.prepare(optim): accelerate would save the first rank's shards for all. Prepare loader and "
            "schedule only, and call optim.step() where accelerator.sync_gradients is true"
        )
