"""Export of a run's model, at its end, as a folder that transformers loads, with the tokenizer beside it."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch import nn

from dzero.checkpoint.save_pretrained import save_pretrained
from dzero.comm.collectives import gather_json
from dzero.config import RunConfig
from dzero.errors import RunError
from dzero.models.published import describe
from dzero.utils.hub_cache import read_bytes
from dzero.zero.sharded import Sharded

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "tokenizer.model",
    "generation_config.json",
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Files of a model folder that a trained model needs as well, those that read pictures and sound among them."""


def export(config: RunConfig, sharded: Sharded, run_folder: Path) -> Path:
    """Write the model or its adapters, and the tokenizer, into export.folder, which is returned. All ranks call this.

    Raises:
        CheckpointError: If the folder exists, or cannot be written; on all ranks.
    """
    folder = run_folder / config.export.folder
    save_pretrained(sharded, folder, merge=config.export.merge)
    source = config.data.tokenizer if config.data.kind == "chat" else None
    if dist.get_rank() == 0 and (source := source or config.model_folder) is not None:
        for name in COPIED:
            file = Path(source) / name
            if file.exists() and not (folder / name).exists():
                (folder / name).write_bytes(read_bytes(file))
    return folder


def is_exported(config: RunConfig, run_folder: Path) -> bool:
    """Return whether the folder of the export exists, as rank 0 sees it. All ranks call this."""
    world = dist.group.WORLD
    assert world is not None
    return bool(gather_json((run_folder / config.export.folder).exists(), world)[0])


def check_export(config: RunConfig, model: nn.Module, run_folder: Path) -> None:
    """Raise RunError before training if the model has no published layout, or the folder of the export exists."""
    if not config.export.at_end:
        return
    if describe(model) is None:
        raise RunError(
            f"export.at_end=true: this model of model.kind={config.model.kind} has no layout that transformers loads; "
            "take export.at_end=false"
        )
    folder = run_folder / config.export.folder
    if folder.exists():
        raise RunError(f"export.folder={config.export.folder}: {folder} exists; name another, or move it away")
