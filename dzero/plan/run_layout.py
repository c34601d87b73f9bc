"""Application of a run's settings to a number of ranks and to this machine: ZeRO table, number of workers, checks.

This module is separate from config.py because it needs torch, which composing a command line does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from dzero.compatibility import check_compatible
from dzero.config import RunConfig, with_settings
from dzero.data.corpus import sources_of, tokenizer_size
from dzero.data.files import find
from dzero.errors import import_optional, user_errors
from dzero.launch.devices import check_workers, device_type, worker_count
from dzero.models.config import check_vocabulary
from dzero.models.hf import check_folder, check_vocabulary_of
from dzero.optim.build import check_layout, check_rule_name, rule_states
from dzero.parallel.blocks import apply_loss_tiles
from dzero.parallel.config import BlockConfig
from dzero.parallel.divisibility import check_microbatches
from dzero.parallel.parallelize import ParallelConfig
from dzero.precedence import NOTHING_TYPED, GaveWay, Typed, settle
from dzero.utils.hub_cache import is_repository
from dzero.utils.launched import check_group, launched
from dzero.utils.rules import Settings
from dzero.zero.config import sums_exactly
from dzero.zero.layout import Layout


def workers_of(config: RunConfig) -> int:
    """Return the number of ranks of a run that this machine starts; ValueError if there are fewer GPUs.

    The number is launch.workers, or the size of the mesh, or the number of devices.
    """
    wanted = config.launch.workers or config.mesh.ranks
    inner = config.mesh.sharing * config.mesh.pp
    if wanted is None and device_type(config.launch) == "cpu" and inner > 1:
        wanted = inner
    return worker_count(replace(config.launch, workers=wanted))


def ranks_of(config: RunConfig) -> int:
    """Return the data-parallel ranks of the planned run: mesh.dp x mesh.cp, else those of torchrun or this machine."""
    if config.mesh.dp is not None:
        return config.mesh.dp * config.mesh.cp
    return config.mesh.data_ranks(int(os.environ["WORLD_SIZE"]) if launched() else workers_of(config))


def layout_of(config: RunConfig, device: str, ranks: int | None = None) -> Layout:
    """Return the ZeRO table for these settings; raise ValueError if they contradict each other or the ranks.

    The data-parallel `ranks` are by default those of the planned run; `zero.reduction=auto` depends on the `device`,
    `cpu` or `cuda`.
    """
    ranks = ranks_of(config) if ranks is None else ranks
    replicate, shard = config.mesh.degrees(ranks, stage=config.zero.stage)
    check_rule_name(config.optim)
    layout = Layout.of(
        config.zero,
        config.precision,
        config.offload.without_idle() if config.auto else config.offload,
        replicate=replicate,
        shard=shard,
        microbatches=config.train.microbatches(config.mesh.readers(ranks)),
        exact=sums_exactly(config.zero, config.precision, device),
        model_ranks=config.mesh.tp,
        pipeline_ranks=config.mesh.pp,
        expert_ranks=config.mesh.ep,
    )
    if config.mesh.pp > 1:
        check_microbatches(config.mesh.pp_schedule, layout.microbatches, config.mesh.pp)
    check_layout(config.optim, layout, {"block.tiles": config.block.tiles})
    return replace(layout, rule_states=rule_states(config.optim))


def parallel_of(config: RunConfig) -> ParallelConfig:
    """Return how a run cuts its model."""
    mesh = config.mesh
    return ParallelConfig(
        ep=mesh.ep,
        stages_per_rank=mesh.stages_per_rank,
        tokens=config.train.sequence_tokens,
        cp=mesh.cp,
        cp_attention=mesh.cp_attention,
    )


def block_of(config: RunConfig) -> BlockConfig:
    """Return the transformations of a run's blocks, without compilation where it does not work."""
    within = config.mesh.ep > 1 or config.zero.unit_bytes is not None  # modules of a block are gathered inside it
    if within or config.mesh.pp_schedule == "zero_bubble":
        return replace(config.block, compile=False)
    return config.block


def tile_loss_of(config: RunConfig, model: nn.Module) -> None:
    """Tile the loss of a run's model in place, before the model is cut along any axis."""
    train, mesh = config.train, config.mesh
    tokens = train.microbatch_sequences * train.sequence_tokens // mesh.cp
    apply_loss_tiles(model, config.block, tokens, tp=mesh.tp, pp=mesh.pp)


def check_ranks(config: RunConfig, world: int) -> None:
    """Raise ValueError if the settings do not fit a run of `world` ranks."""
    layout_of(config, device_type(config.launch), config.mesh.data_ranks(world))


def settled(config: RunConfig, typed: Typed) -> tuple[RunConfig, tuple[GaveWay, ...]]:
    """Return the run in which presets gave way to what was typed, as `dzero/precedence.py` says, and what gave way.

    Here settings are checked together with the number of ranks and the devices. Raises ValueError.
    """

    def check(values: Mapping[str, Any]) -> RunConfig:
        return _fits_ranks(with_settings(config, values))

    return settle(dict[str, Any](), check, lambda values, way: {**values, way.key: way.value}, typed)


def _fits_ranks(config: RunConfig) -> RunConfig:
    """Return `config`; raise ValueError if its settings do not fit this machine's ranks."""
    check_compatible(Settings.of(profile=config.profile).having({"device": device_type(config.launch)}))
    layout_of(config, device_type(config.launch))
    return config


def check_tokenizer(config: RunConfig) -> None:
    """Raise ValueError if the tokenizer has ids that the model has no embedding for, before any data are tokenized."""
    size = tokenizer_size(config.data, config.model_folder)
    if size is None:
        return
    if config.model.name_or_path is not None:
        check_vocabulary_of(config.model.name_or_path, size)
    else:
        check_vocabulary(config.model.vocab_size, size)


def check_all_here(runs: Sequence[RunConfig], typed: Typed = NOTHING_TYPED) -> None:
    """Check all runs of a command line, on which was `typed`, before the first one starts; raises RunError."""
    for config in runs:
        with user_errors():
            check_here(config, typed)


def check_here(config: RunConfig, typed: Typed = NOTHING_TYPED) -> None:
    """Raise ValueError or OSError for problems with this machine's devices and files, before any worker starts."""
    check_group()
    if not launched():
        check_workers(workers_of(config))
        config, _ = settled(config, typed)
        check_ranks(config, workers_of(config))
    elif config.launch.workers is not None:
        raise ValueError(f"launch.workers={config.launch.workers} has no effect under torchrun; remove it")
    if config.monitor.wandb is not None:
        import_optional("wandb", f"monitor.wandb={config.monitor.wandb}", "wandb")
    if config.data.path is not None:
        find(config.data.path)
    elif config.data.paths is not None:
        sources_of(config.data)
    elif config.data.kind == "chat":
        raise ValueError("data.kind=chat: set data.path to a .jsonl, .json or .parquet file of chats, or a folder")
    if config.model.name_or_path is not None:
        check_folder(config.model.name_or_path)
    if (source := config.resume.source) not in (None, "auto") and not Path(str(source)).is_dir():
        latest = f"the latest in checkpoint.folder={config.checkpoint.folder}"
        raise FileNotFoundError(f"resume={source}: no such folder; take resume=auto for {latest}, or a checkpoint's")
    weights = config.model.weights
    if isinstance(weights, str) and not Path(weights).is_dir():
        repair = f": run `hf download {weights}` first" if is_repository(weights) else ""
        raise FileNotFoundError(f"model.weights={weights}: no such folder; nothing is downloaded{repair}")
