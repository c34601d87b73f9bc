"""A sharded model of transformers, or of the project, as a folder that transformers loads.

    all ranks    gather one tensor after the other, in the order of the files
    rank 0       writes each in pieces, and has at most one whole tensor in host memory

If rank 0 fails, for instance on a full disk, it takes part in the remaining gathers, and all ranks raise at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from dzero.checkpoint.box import Box
from dzero.checkpoint.export_hf import SHARD_BYTES, plan_of, write
from dzero.checkpoint.first_rank import on_first_rank
from dzero.checkpoint.format import DTYPES, StoredBox
from dzero.checkpoint.save_adapter import MergedWeight, merged_tensors, save_adapter
from dzero.models.adapters import has_adapters
from dzero.models.published import describe, published_name
from dzero.zero.sharded import Sharded


def save_pretrained(
    sharded: Sharded, folder: str | Path, *, merge: bool = False, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write a sharded model as safetensors with config.json, for `from_pretrained`. All ranks call this.

        dzero.save_pretrained(sharded, "trained")
        AutoModelForCausalLM.from_pretrained("trained")

    Of a model with adapters of peft (LoRA), only these are written, unless they are merged into its weights:

        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("base"), "trained")

    Parameters are written in the dtype they are trained in. For another one, save a checkpoint and use `dzero export`.

    Args:
        sharded: A model of transformers, or one of the project's llamas, after `shard`.
        folder: Folder to create; it gets its name only when all of it is on disk.
        merge: Merge the adapters into the weights that they belong to, as peft's `merge_and_unload` does.
        shard_bytes: Maximum bytes of the tensors in a file. A larger tensor gets a file of its own.

    Raises:
        ValueError: If the model has no published layout, other axes than the data-parallel ones cut it, or there are no
            adapters to merge.
        CheckpointError: If the folder exists, or the disk is too small or fails; on all ranks.
    """
    adapted = has_adapters(sharded.model)
    if adapted and not merge:
        save_adapter(sharded, Path(folder))
        return
    if merge and not adapted:
        raise ValueError(f"merge=True: {type(sharded.model).__name__} has no adapters of peft; leave it away")
    described = describe(sharded.model, merged=merge)
    if described is None:
        raise ValueError(
            f"{type(sharded.model).__name__}: only models of transformers and the project's llamas have a layout that "
            "transformers loads; save a checkpoint with dzero.Checkpointer instead"
        )
    if sharded.stages is not None or any(param.split for unit in sharded.shapes for param in unit.params):
        raise ValueError(
            "a model that tp, pp or ep cuts is not gathered here: save a checkpoint with "
            "dzero.Checkpointer(...).save(step, {'model': dzero.describe(model)}), then run `dzero export`"
        )
    tensors = dict(_tensors(sharded, merge=merge))
    source = {published_name(described["kind"], name): name for name in tensors}
    parts = {
        name: StoredBox.unplaced(None, tensors[own].dtype, tuple(tensors[own].shape)) for name, own in source.items()
    }
    planned = plan_of(parts, source, json.loads(described["config"]), sharded.layout.param.dtype, shard_bytes)
    waiting = [own for own in source.values() if tensors[own].numel()]
    gathered = _Gathered(tensors, waiting)
    on_first_rank(sharded, lambda: write(Path(folder), planned, gathered.read), gathered.skip_rest)


class _Gathered:
    """Whole tensors, gathered one by one in the order of `names` on all ranks."""

    def __init__(self, tensors: Mapping[str, torch.Tensor | MergedWeight], names: list[str]) -> None:
        self._tensors, self._names = tensors, names
        self._name, self._tensor = "", torch.empty(0)

    def read(self, name: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return a box of a tensor, whose first box is asked for in the order of the names."""
        if name != self._name:
            assert self._names[0] == name
            self._name, self._tensor = name, torch.empty(0)
            self._tensor = self._gather().cpu()
        rows = self._tensor.narrow(0, box.offset[0], box.size[0]) if self._tensor.ndim else self._tensor
        assert rows.dtype == dtype
        return rows.contiguous()

    def skip_rest(self) -> None:
        """Take part in the gathers that are left."""
        while self._names:
            self._gather()

    def _gather(self) -> torch.Tensor:
        tensor = self._tensors[self._names.pop(0)]
        return (tensor.full_tensor() if isinstance(tensor, (DTensor, MergedWeight)) else tensor).detach()


def _tensors(sharded: Sharded, *, merge: bool) -> Iterator[tuple[str, torch.Tensor | MergedWeight]]:
    """Yield the model's tensors that transformers saves, tied ones once: by name, as the state dict has them."""
    state, own = sharded.model.state_dict(), {name for name, _ in sharded.model.named_parameters()}
    aliases = {name for name, _ in sharded.model.named_parameters(remove_duplicate=False)} - own
    saved = {name: each for name, each in state.items() if name not in aliases and each.dtype in DTYPES.values()}
    yield from merged_tensors(sharded.model, saved) if merge else saved.items()
