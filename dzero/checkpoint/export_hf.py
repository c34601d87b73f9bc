"""Export of a checkpoint in the Hugging Face format: safetensors files with an index, and config.json.

    OUT/
        config.json
        model.safetensors                     if everything fits in `shard_bytes`, otherwise
        model-00001-of-00003.safetensors …    in the checkpoint's order; no tensor is split
        model.safetensors.index.json          file of each tensor

An export needs no process group and no device. Tensors are streamed from the ranks' files, at most `PIECE_BYTES` of one
at a time, and each block is verified before its bytes are used. Parameters are the fp32 masters rounded as in training
(zero/rounding.py), so bf16 equals the working copy bit for bit. Buffers keep their dtype. A tied parameter is stored in
a checkpoint once, under the name that transformers keeps as well. Parameters that are published in another layout, such
as one tensor per expert, are written in that one: the description of the model says how (models/conversions.py).
"""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from dzero.checkpoint.box import Box
from dzero.checkpoint.errors import CheckpointError
from dzero.checkpoint.format import BUFFER, DTYPES, StoredBox
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.states import values_of
from dzero.checkpoint.store import PARTIAL, Directory
from dzero.checkpoint.writer import header, laid_out
from dzero.hardware import dtype_of, format_bytes
from dzero.models.conversions import Conversion, convert_all
from dzero.models.published import KINDS, published_name
from dzero.models.safetensors_reader import INDEX, SINGLE
from dzero.models.tensor_views import Readable
from dzero.zero.rounding import to_working

SHARD_BYTES = 5_000_000_000
PIECE_BYTES = 4 << 20
"""Bytes of a tensor, counted in fp32, that are in memory at a time; at least one row is."""
BASE = "base"
"""Key in a checkpoint's `extra` for the result of `models.base_record.base_record`."""
EXPORTED = ("bf16", "fp16", "fp32")
CONFIG = "config.json"
MODEL = "model"
"""Key in a checkpoint's `extra` for the result of `models.published.describe`."""


@dataclass(frozen=True)
class ExportPlan:
    """Files to write, with the positions of their tensors, and what each tensor is read from."""

    files: dict[str, dict[str, StoredBox]]
    source: Mapping[str, Readable]
    config: str

    @property
    def tensor_bytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(part.end - part.start for parts in self.files.values() for part in parts.values())


def plan(checkpoint: Checkpoint, dtype: str, shard_bytes: int = SHARD_BYTES) -> ExportPlan:
    """Plan the export of a checkpoint with parameters in `dtype`: `bf16`, `fp16` or `fp32`.

    A file has at most `shard_bytes` of tensors; a larger tensor gets a file of its own. Raise `CheckpointError` if the
    checkpoint does not describe its model.
    """
    wanted = dtype_of(dtype, key="--dtype", allowed=EXPORTED)
    if shard_bytes < 1:
        raise ValueError(f"--shard-bytes={shard_bytes}: must be a whole number ≥ 1")
    described = _described(checkpoint)
    values: dict[str, Readable] = {}
    dtypes: dict[str, torch.dtype] = {}
    try:
        for own, stored in values_of(checkpoint).items():
            name, like = published_name(described.kind, own), checkpoint.part(stored)
            if name in values:
                raise ValueError(f"{stored} and {values[name].where} are both {name}")
            dtypes[stored] = DTYPES[like.dtype] if stored.startswith(f"{BUFFER}.") else wanted
            values[name] = _Values(checkpoint, stored, like.shape, dtypes[stored])
        source = convert_all(described.layout, values)
    except ValueError as error:
        raise CheckpointError(str(checkpoint.path), str(error)) from error
    return plan_of(source, dtypes, json.loads(described.config), wanted, shard_bytes)


def plan_of(
    source: Mapping[str, Readable],
    dtypes: Mapping[str, torch.dtype],
    config: Mapping[str, Any],
    dtype: torch.dtype,
    shard_bytes: int,
) -> ExportPlan:
    """Return the plan of files with these tensors, and of a config.json that names their `dtype`.

    `dtypes` has that of each tensor, by the first name that it is stored under.
    """
    told = {**config, "dtype": str(dtype).removeprefix("torch.")}
    parts = {name: StoredBox.unplaced(None, dtypes[each.stored[0]], each.shape) for name, each in source.items()}
    return ExportPlan(_into_files(parts, shard_bytes), source, json.dumps(told, indent=2, sort_keys=True) + "\n")


def export(out: Path, planned: ExportPlan, progress: Callable[[int], None] = lambda count: None) -> None:
    """Write `planned` to the new folder `out`, which gets this name only when all of it is durable.

    `progress` is called with the bytes of each piece that was written. If `out` exists, the disk is too small, the
    checkpoint is damaged, or the dtype cannot hold a value, raise `CheckpointError` and leave nothing behind.
    """
    out = out.absolute()
    unfinished = out.with_name(out.name + PARTIAL)
    for path, whose in ((out, ""), (unfinished, ", left by an export that was stopped or is under way")):
        if os.path.lexists(path):
            raise CheckpointError(str(path), f"it is there already{whose}: remove it, or choose another folder")
    with _told(out.parent):
        free = shutil.disk_usage(out.parent).free
    if free < planned.tensor_bytes:
        needed = f"{format_bytes(planned.tensor_bytes)} to write, {format_bytes(free)} free"
        raise CheckpointError(str(out), f"{needed}: free space, or choose another disk")
    with _told(unfinished):
        unfinished.mkdir()
    try:
        with Directory(unfinished) as folder:
            for name, parts in planned.files.items():
                _write_tensors(folder, name, parts, planned.source, progress)
            if SINGLE not in planned.files:
                files = {tensor: name for name, parts in planned.files.items() for tensor in parts}
                index = {"metadata": {"total_size": planned.tensor_bytes}, "weight_map": dict(sorted(files.items()))}
                folder.write(INDEX, (json.dumps(index, indent=2) + "\n").encode())
            folder.write(CONFIG, planned.config.encode())
            folder.sync()
        with _told(out):
            unfinished.rename(out)
        with Directory(out.parent) as above:
            above.sync()
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _Description(msgspec.Struct):
    """Model of a checkpoint; see `models.published.describe`."""

    kind: str
    config: str
    layout: tuple[Conversion, ...] = ()


def _described(checkpoint: Checkpoint) -> _Description:
    """Return the description of the checkpoint's model."""
    extra = checkpoint.manifest.state.get("extra")
    described = extra.get(MODEL) if isinstance(extra, dict) else None
    if isinstance(extra, dict) and BASE in extra:
        raise CheckpointError(
            str(checkpoint.path),
            "it holds adapters, without the model that they belong to: resume the run with export.at_end=true, which "
            "writes a folder that peft loads",
        )
    if described is None:
        raise CheckpointError(
            str(checkpoint.path),
            "it does not say which model it is of: only the project's llamas and Mixtrals, and models of transformers, "
            f"have a layout there. In a loop of your own, save extra={{'{MODEL}': dzero.describe(model)}}",
        )
    with suppress(ValueError, RecursionError):
        found = msgspec.convert(described, _Description)
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
    with _told(folder.path / name), os.fdopen(fd, "wb", buffering=0) as file:
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


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Raise system errors as `CheckpointError`."""
    try:
        yield
    except OSError as error:
        repair = "free space, or choose" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "choose"
        what = f"{error.strerror}: {repair} another folder; nothing was exported"
        raise CheckpointError(str(path), what) from error
