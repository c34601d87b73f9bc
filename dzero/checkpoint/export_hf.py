"""Export of a checkpoint in the Hugging Face format: safetensors files with an index, and config.json.

    OUT/
        config.json
        model.safetensors                     if everything fits in `shard_bytes`, otherwise
        model-00001-of-00003.safetensors …    in the checkpoint's order; no tensor is split
        model.safetensors.index.json          file of each tensor
    OUT/                                      of adapters alone, for `PeftModel.from_pretrained`
        adapter_config.json
        adapter_model.safetensors

An export needs no process group and no device. Tensors are streamed from the ranks' files, at most `PIECE_BYTES` of one
at a time, and each block is verified before its bytes are used. Parameters are the fp32 masters rounded as in training
(zero/rounding.py), so bf16 equals the working copy bit for bit. Buffers keep their dtype. A tied parameter is stored in
a checkpoint once, under the name that transformers keeps as well. Parameters that are published in another layout, such
as one tensor per expert, are written in that one: the description of the model says how (models/conversions.py).
"""

from __future__ import annotations

import json
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from dzero.checkpoint.adapter_base import Rounded, base_weights
from dzero.checkpoint.box import Box
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import BUFFER, DTYPES, MASTER, StoredBox
from dzero.checkpoint.new_folder import new_folder, reported_as_export_error
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.states import values_of
from dzero.checkpoint.store import Directory
from dzero.checkpoint.writer import header, laid_out
from dzero.hardware import dtype_of
from dzero.models.hf import CONFIG
from dzero.models.published import KINDS, Description, Published, published
from dzero.models.safetensors_reader import INDEX, SINGLE
from dzero.models.tensor_views import Readable
from dzero.zero.rounding import to_working

SHARD_BYTES = 5_000_000_000
PIECE_BYTES = 4 << 20
"""Bytes of a tensor, counted in fp32, that are in memory at a time; at least one row is."""
BASE = "base"
"""Key in a checkpoint's `extra` for the result of `models.base_record.base_record`."""
EXPORTED = ("bf16", "fp16", "fp32")
ADAPTERS = "adapter_model.safetensors"
"""File of the tensors of adapters, as peft names it."""
MODEL = "model"
"""Key in a checkpoint's `extra` for the result of `models.published.describe`."""


@dataclass(frozen=True)
class ExportPlan:
    """Files to write, with the positions of their tensors, what each tensor is read from, and files of text."""

    files: dict[str, dict[str, StoredBox]]
    source: Mapping[str, Readable]
    texts: Mapping[str, str]

    @property
    def tensor_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(part.end - part.start for parts in self.files.values() for part in parts.values())


def plan(
    checkpoint: Checkpoint,
    dtype: str,
    shard_bytes: int = SHARD_BYTES,
    *,
    merge: bool = False,
    base: str | None = None,
) -> ExportPlan:
    """Plan the export of a checkpoint with parameters in `dtype`: `bf16`, `fp16` or `fp32`.

    Of a model with adapters of peft, these alone are exported, or with `merge` the whole model with the adapters merged
    into its weights. A file has at most `shard_bytes` of tensors; a larger tensor gets a file of its own.

    Args:
        checkpoint: The checkpoint, which may be one of adapters without the model that they belong to.
        dtype: Dtype of all parameters.
        shard_bytes: Bytes of tensors in a file.
        merge: Merge the adapters.
        base: Folder of the model that the adapters belong to; None: the one that the run was given.

    Raises:
        CheckpointError: If the checkpoint does not describe its model, or has no adapters to merge.
        ValueError: If an argument is not allowed, or `base` is another model than the one that was trained.
    """
    wanted = dtype_of(dtype, key="--dtype", allowed=EXPORTED)
    if shard_bytes < 1:
        raise ValueError(f"--shard-bytes={shard_bytes}: must be a whole number ≥ 1")
    if base is not None and not merge:
        raise ValueError(f"--base={base}: the model is only read to merge adapters into it; add --merge")
    described = _described(checkpoint)
    if merge and described.adapter is None:
        raise CheckpointError(str(checkpoint.path), "it holds no adapters to merge: leave --merge away")
    values: dict[str, Readable] = {}
    dtypes: dict[str, torch.dtype] = {}
    trained = []
    for own, stored in values_of(checkpoint).items():
        like = checkpoint.part(stored)
        dtypes[stored] = DTYPES[like.dtype] if stored.startswith(f"{BUFFER}.") else wanted
        values[own] = _Values(checkpoint, stored, like.shape, dtypes[stored])
        trained += [own] if stored.startswith(f"{MASTER}.") else []
    of_base: dict[str, Rounded] = {}
    if merge:
        of_base = base_weights(described, checkpoint.manifest.state["extra"].get(BASE), base, wanted)
        dtypes |= {value.stored[0]: value.dtype for value in of_base.values()}
    try:
        content = published(described, values, trained=trained, base=of_base if merge else None)
    except ValueError as error:
        raise CheckpointError(str(checkpoint.path), str(error)) from error
    return plan_of(content, dtypes, wanted, shard_bytes)


def plan_of(content: Published, dtypes: Mapping[str, torch.dtype], dtype: torch.dtype, shard_bytes: int) -> ExportPlan:
    """Return the plan of the files of a model's folder, or of that of its adapter.

    `dtypes` has that of each tensor, by the first name that it is stored under. config.json names `dtype`.
    """
    source = content.tensors
    parts = {name: StoredBox.unplaced(None, dtypes[each.stored[0]], each.shape) for name, each in source.items()}
    if content.file != CONFIG:
        return ExportPlan({ADAPTERS: laid_out(parts)}, source, {content.file: content.settings, **content.texts})
    told = {**json.loads(content.settings), "dtype": str(dtype).removeprefix("torch.")}
    texts = {CONFIG: json.dumps(told, indent=2, sort_keys=True) + "\n", **content.texts}
    planned = ExportPlan(_into_files(parts, shard_bytes), source, texts)
    if SINGLE not in planned.files:
        files = {tensor: name for name, of_file in planned.files.items() for tensor in of_file}
        index = {"metadata": {"total_size": planned.tensor_bytes}, "weight_map": dict(sorted(files.items()))}
        texts[INDEX] = json.dumps(index, indent=2) + "\n"
    return planned


def export(out: Path, planned: ExportPlan, progress: Callable[[int], None] = lambda count: None) -> None:
    """Write the planned files into a new folder `out`, which gets its name when all of it is on disk.

    `progress` is called with the bytes of each piece that was written. If `out` exists, the disk is too small, the
    checkpoint is damaged, or the dtype cannot hold a value, raise `CheckpointError` and leave nothing behind.
    """
    with new_folder(out, planned.tensor_bytes) as folder:
        for name, parts in planned.files.items():
            _write_tensors(folder, name, parts, planned.source, progress)
        for name, text in planned.texts.items():
            folder.write(name, text.encode())


def _described(checkpoint: Checkpoint) -> Description:
    """Return the description of the checkpoint's model."""
    extra = checkpoint.manifest.state.get("extra")
    described = extra.get(MODEL) if isinstance(extra, dict) else None
    if described is None and isinstance(extra, dict) and BASE in extra:
        raise CheckpointError(
            str(checkpoint.path),
            "it holds adapters without their settings, as an earlier version saved them: resume the run with "
            "export.at_end=true, which writes a folder that peft loads",
        )
    if described is None:
        raise CheckpointError(
            str(checkpoint.path),
            "it does not say which model it is of: only the project's llamas and Mixtrals, and models of transformers, "
            f"have a layout there. In a loop of your own, save extra={{'{MODEL}': dzero.describe(model)}}",
        )
    with suppress(ValueError, RecursionError):
        found = msgspec.convert(described, Description)
        if found.kind in KINDS and isinstance(json.loads(found.config), dict):
            return found
    told = textwrap.shorten(repr(described), 200, placeholder=" ...")
    raise CheckpointError(str(checkpoint.path), f"its model is {told}, no kind of {KINDS} with a config")


def _into_files(parts: Mapping[str, StoredBox], shard_bytes: int) -> dict[str, dict[str, StoredBox]]:
    """Distribute the tensors over files in order; a new file begins when one is full."""
    groups: list[dict[str, StoredBox]] = [{}]
    filled = 0
    for name, part in parts.items():
        if groups[-1] and filled + part.size_bytes > shard_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = part
        filled += part.size_bytes
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return {name: laid_out(group) for name, group in zip(names if len(groups) > 1 else [SINGLE], groups, strict=True)}


def _write_tensors(
    folder: Directory,
    name: str,
    parts: Mapping[str, StoredBox],
    source: Mapping[str, Readable],
    progress: Callable[[int], None],
) -> None:
    """Write one file; it is on disk on return."""
    fd = folder.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    with reported_as_export_error(folder.path / name), os.fdopen(fd, "wb", buffering=0) as file:
        _write(file.fileno(), memoryview(header(parts, {"format": "pt"})))
        for tensor, part in parts.items():
            for box in _pieces(part.shape):
                values = source[tensor].read(box.offset, box.size).contiguous()
                assert values.dtype == DTYPES[part.dtype]
                data = values.view(-1).view(torch.uint8).numpy()
                _write(fd, data.data)
                progress(data.size)
        os.fsync(fd)


def _write(fd: int, data: memoryview[Any]) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _pieces(shape: tuple[int, ...]) -> list[Box]:
    """Split a tensor into boxes of whole rows, each small enough to be in memory."""
    whole = Box.whole(shape)
    if not shape or not whole.elems:
        return [whole] if whole.elems else []
    rows = max(1, PIECE_BYTES // (4 * math.prod(shape[1:])))
    return [whole.narrow(first, min(rows, shape[0] - first)) for first in range(0, shape[0], rows)]


@dataclass(frozen=True)
class _Values:
    """A parameter or buffer in a checkpoint, read in `dtype`; see `models.tensor_views.Readable`."""

    checkpoint: Checkpoint
    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stored(self) -> tuple[str, ...]:
        return (self.where,)

    def read(self, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        return _converted(self.checkpoint, self.where, Box(tuple(offset), tuple(size)), self.dtype)

    def __call__(self) -> torch.Tensor:
        return self.read((0,) * len(self.shape), self.shape)


def _converted(checkpoint: Checkpoint, stored: str, box: Box, dtype: torch.dtype) -> torch.Tensor:
    """Read a box in `dtype`; raise `CheckpointError` if a value does not fit."""
    values = checkpoint.read(stored, box)
    if values.dtype == dtype:
        return values
    rounded = to_working(values.float(), dtype)
    if not rounded.isfinite().all() and values.isfinite().all():
        raise CheckpointError(
            str(checkpoint.path),
            f"{stored} holds {values.abs().max():.4g}, more than {dtype} can: export another --dtype",
        )
    return rounded
