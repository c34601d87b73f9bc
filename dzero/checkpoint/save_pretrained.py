"""A sharded model of transformers, or of the project, as a folder that transformers loads.

    all ranks    gather one tensor after the other, in the order of the files
    rank 0       writes each in pieces, and has at most one whole tensor in host memory, or those that are joined in one

If rank 0 fails, for instance on a full disk, it takes part in the remaining gathers, and all ranks raise at the end.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor

from dzero.checkpoint.export_hf import SHARD_BYTES, export, plan_of
from dzero.checkpoint.first_rank import on_first_rank
from dzero.checkpoint.format import DTYPES
from dzero.checkpoint.save_adapter import MergedWeight, merged_tensors, save_adapter
from dzero.mesh import EXPERT
from dzero.models.adapters import has_adapters
from dzero.models.conversions import Conversion, convert_all
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
        sharded: A model of transformers, or one of the project's llamas or Mixtrals, after `shard`.
        folder: Folder to create; it gets its name only when all of it is on disk.
        merge: Merge the adapters into the weights that they belong to, as peft's `merge_and_unload` does.
        shard_bytes: Maximum bytes of the tensors in a file. A larger tensor gets a file of its own.

    Raises:
        ValueError: If the model has no published layout, tp or pp cut it, or there are no adapters to merge.
        CheckpointError: If the folder exists, or the disk is too small or fails; on all ranks.
    """
    splits = {param.split.axis for unit in sharded.shapes for param in unit.params if param.split is not None}
    if sharded.stages is not None or splits - {EXPERT}:
        raise ValueError(
            "a model that tp or pp cuts is not gathered here: save a checkpoint with "
            "dzero.Checkpointer(...).save(step, {'model': dzero.describe(model)}), then run `dzero export`"
        )
    adapted = has_adapters(sharded.model)
    if adapted and not merge:
        save_adapter(sharded, Path(folder))
        return
    if merge and not adapted:
        raise ValueError(f"merge=True: {type(sharded.model).__name__} has no adapters of peft; leave it away")
    described = describe(sharded.model, merged=merge)
    if described is None:
        raise ValueError(
            f"{type(sharded.model).__name__}: only models of transformers, and llamas and Mixtrals of the project, "
            "have a layout that transformers loads; save a checkpoint with dzero.Checkpointer instead"
        )
    tensors = dict(_tensors(sharded, merge=merge))
    gathered = _Gathered(tensors)
    values = {
        published_name(described["kind"], name): _Tensor(gathered, name, tuple(tensor.shape))
        for name, tensor in tensors.items()
    }
    source = convert_all(msgspec.convert(described.get("layout", ()), tuple[Conversion, ...]), values)
    gathered.expect([each.stored for each in source.values()])
    dtypes, config = {name: tensor.dtype for name, tensor in tensors.items()}, json.loads(described["config"])
    planned = plan_of(source, dtypes, config, sharded.layout.param.dtype, shard_bytes)
    on_first_rank(sharded, lambda: export(Path(folder), planned), gathered.skip_rest)


class _Gathered:
    """Whole tensors, gathered one by one in the same order on all ranks.

    Rank 0 holds those that one tensor of a file is made of, and drops them when it asks for others.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor | MergedWeight]) -> None:
        self._tensors = tensors
        self._waiting: list[str] = []
        self._together: dict[str, tuple[str, ...]] = {}
        self._held: dict[str, torch.Tensor] = {}

    def expect(self, groups: Iterable[tuple[str, ...]]) -> None:
        """Set the order: that of `groups`, the names of the tensors that are read together."""
        for group in groups:
            self._together |= dict.fromkeys(group, group)
        self._waiting = [name for name in self._together if self._tensors[name].numel()]

    def whole(self, name: str) -> torch.Tensor:
        """Return a tensor on the CPU; the first calls for each are in the order of gathers."""
        if name not in self._held:
            group = self._together[name]
            self._held = {each: tensor for each, tensor in self._held.items() if each in group}
            for each in group:
                if each not in self._held and self._tensors[each].numel():
                    assert self._waiting[0] == each
                    self._held[each] = self._gather().cpu()
        return self._held[name]

    def skip_rest(self) -> None:
        """Take part in the gathers that are left."""
        while self._waiting:
            self._gather()

    def _gather(self) -> torch.Tensor:
        tensor = self._tensors[self._waiting.pop(0)]
        return (tensor.full_tensor() if isinstance(tensor, (DTensor, MergedWeight)) else tensor).detach()


class _Tensor:
    """A tensor of the sharded model, gathered when it is read; see `models.tensor_views.Readable`."""

    def __init__(self, gathered: _Gathered, name: str, shape: tuple[int, ...]) -> None:
        self._gathered, self.shape, self.where, self.stored = gathered, shape, name, (name,)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        box = tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))
        return self._gathered.whole(self.where)[box]

    def __call__(self) -> torch.Tensor:
        return self._gathered.whole(self.where)


def _tensors(sharded: Sharded, *, merge: bool) -> Iterator[tuple[str, torch.Tensor | MergedWeight]]:
    """Yield the model's tensors that transformers saves, tied ones once: by name, as the state dict has them."""
    state, own = sharded.model.state_dict(), {name for name, _ in sharded.model.named_parameters()}
    aliases = {name for name, _ in sharded.model.named_parameters(remove_duplicate=False)} - own
    saved = {name: each for name, each in state.items() if name not in aliases and each.dtype in DTYPES.values()}
    yield from merged_tensors(sharded.model, saved) if merge else saved.items()
