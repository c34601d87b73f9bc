"""A sharded model of transformers, or of the project, as a folder that transformers or peft loads.

    all ranks    gather one tensor after the other, in the order of the files (whole_tensors.py)
    rank 0       writes each in pieces, and has at most one whole tensor in host memory, or those that are joined in one

If rank 0 fails, for instance on a full disk, it takes part in the remaining gathers, and all ranks raise at the end.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dzero.checkpoint.export_hf import SHARD_BYTES, export, plan_of
from dzero.checkpoint.first_rank import on_first_rank
from dzero.checkpoint.whole_tensors import WholeTensors
from dzero.models.adapter_names import settings_of
from dzero.models.adapters import adapted_part, has_adapters
from dzero.models.published import Description, describe, published
from dzero.zero.sharded import Sharded, check_sharded


def save_pretrained(
    sharded: Sharded, folder: str | Path, *, merge: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a sharded model as safetensors with config.json, for `from_pretrained`. All ranks call this.

        dzero.save_pretrained(sharded, "trained")
        AutoModelForCausalLM.from_pretrained("trained")

    Of a model with an adapter of peft, only this is written, unless it is merged into its weights:

        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "trained")

    Parameters are written in the dtype they are trained in. For another one, save a checkpoint and use `dzero export`.

    Args:
        sharded: A model of transformers, or one of the project's llamas or Mixtrals, after `shard`.
        folder: Folder to create; it gets its name only when all of it is on disk.
        merge: Merge the adapters into the weights that they belong to, as peft's `merge_and_unload` does.
        shard_bytes: Maximum bytes of the tensors in a file. A larger tensor gets a file of its own.

    Raises:
        ValueError: If the model has no published layout, its adapters cannot be saved, or there are none to merge.
        CheckpointError: If the folder exists, or the disk is too small or fails; on all ranks.
    """
    check_sharded(sharded, "dzero.save_pretrained", "dzero.save_pretrained(sharded, folder)")
    model = sharded.model
    adapted, name = has_adapters(model), type(model).__name__
    if merge and not adapted:
        raise ValueError(f"merge=True: {name} has no adapters of peft; leave it away")
    if adapted:
        settings_of(adapted_part(model).peft_config)
    if (found := describe(model)) is None:
        raise ValueError(
            f"{name}: only models of transformers, and llamas and Mixtrals of the project, have a layout that "
            "transformers loads; save a checkpoint with dzero.Checkpointer instead"
        )
    described = msgspec.convert(found, Description)
    tensors = WholeTensors(sharded)
    values, dtypes = tensors.readable(), tensors.dtypes
    content = published(described, values, trained=tensors.trained, base={} if merge else None)
    tensors.expect([each.stored for each in content.tensors.values()])
    planned = plan_of(content, dtypes, sharded.layout.param.dtype, shard_bytes)
    on_first_rank(sharded, lambda: export(Path(folder), planned), tensors.skip_rest)
