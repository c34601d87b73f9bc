"""Checkpoints written from tensors by hand, after the description of their format, and read by torch's own loader.

    step_00000007/manifest.json            seals of the indexes, and what is no tensor
    step_00000007/rank_00000.json          where each part of a tensor lies, and checksums of blocks
    step_00000007/rank_00000.safetensors   the parts, one behind the other

A JSON file is `{"body":BODY,"xxh3":CHECKSUM}`, with the keys of BODY sorted.
"""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch import Tensor

import dzero

PAGE = 4096
MANIFEST, LATEST, LOCK = "manifest.json", "latest.json", ".lock"
NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in safetensors files."""


class Piece(NamedTuple):
    """A box of a tensor: of which one, how large that is, where the box begins, and its values."""

    of: str | None
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: Tensor


def index_name(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def data_name(rank: int) -> str:
    return f"rank_{rank:05d}.safetensors"


def piece(of: str | None, whole: Tensor, offset: Sequence[int] = (), size: Sequence[int] = ()) -> Piece:
    """The box of `whole` at `offset` of `size`; all of it without them."""
    offset, size = tuple(offset) or (0,) * whole.dim(), tuple(size) or tuple(whole.shape)
    box = whole[tuple(slice(first, first + count) for first, count in zip(offset, size, strict=True))]
    return Piece(of, tuple(whole.shape), offset, box)


def in_rows(tensors: Mapping[str, Tensor], ranks: int) -> list[dict[str, Piece]]:
    """Each tensor cut along its first dim into a chunk for every rank; the last ones may be short or empty."""
    found: list[dict[str, Piece]] = [{} for _ in range(ranks)]
    for name, whole in tensors.items():
        step = -(-whole.shape[0] // ranks)
        for rank in range(ranks):
            first = min(rank * step, whole.shape[0])
            size = (min(step, whole.shape[0] - first), *whole.shape[1:])
            found[rank][name] = piece(name, whole, (first, *(0 for _ in whole.shape[1:])), size)
    return found


def write(
    folder: Path,
    ranks: Sequence[Mapping[str, Piece]],
    *,
    step: int = 7,
    extra: Mapping[str, Any] | None = None,
    block_bytes: int = PAGE,
) -> Path:
    """`folder`, a checkpoint of what each rank wrote under which name; no run has saved it."""
    folder.mkdir(parents=True)
    seals = [_write_rank(folder, rank, pieces, block_bytes) for rank, pieces in enumerate(ranks)]
    body = {"version": 1, "step": step, "seals": seals, "state": {"optim": {}, "extra": dict(extra or {})}}
    write_sealed(folder / MANIFEST, body)
    return folder


def write_llama(
    folder: Path, tensors: Mapping[str, Tensor], *, vocab: int = 5, width: int = 10, ranks: int = 1, layers: int = 0
) -> Path:
    """`folder`, a checkpoint of a llama of dzero: `tensors`, and zeros for embeddings and norm without a value."""
    sizes = {"embedding.weight": (vocab, width), "norm.weight": (width,), "head.weight": (vocab, width)}
    there = {name.partition(".")[2] for name in tensors}
    rest = {f"master.{name}": torch.zeros(size) for name, size in sizes.items() if name not in there}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    }
    extra = {"model": {"kind": "llama", "config": json.dumps(config)}}
    return write(folder, in_rows({**tensors, **rest}, ranks), extra=extra, block_bytes=1 << 20)


def _write_rank(folder: Path, rank: int, pieces: Mapping[str, Piece], block_bytes: int) -> str:
    """A rank's two files; the seal of its index. The header is padded with spaces to a whole page."""
    header, parts, at = dict[str, Any](), dict[str, Any](), 0
    for name, each in pieces.items():
        dtype, size = NAMES[each.values.dtype], tuple(each.values.shape)
        end = at + math.prod(size) * each.values.dtype.itemsize
        header[name] = {"dtype": dtype, "shape": size, "data_offsets": [at, end]}
        parts[name] = {"of": each.of, "dtype": dtype, "shape": each.shape, "offset": each.offset, "size": size}
        parts[name] |= {"start": at, "end": end}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-(8 + len(text)) // PAGE) * PAGE - 8)
    data = len(text).to_bytes(8, "little") + text + b"".join(raw(each.values) for each in pieces.values())
    (folder / data_name(rank)).write_bytes(data)
    sums = [xxhash.xxh3_64_hexdigest(data[start : start + block_bytes]) for start in range(0, len(data), block_bytes)]
    body = {"rank": rank, "file_bytes": len(data), "data_start": 8 + len(text), "block_bytes": block_bytes}
    return write_sealed(folder / index_name(rank), body | {"sums": sums, "parts": parts})


def write_sealed(path: Path, body: Any) -> str:
    """Write a body, or its bytes as they are, with its right checksum; return that."""
    encoded = body if isinstance(body, bytes) else msgspec.json.encode(body, order="sorted")
    checksum = xxhash.xxh3_64_hexdigest(encoded)
    path.write_bytes(b'{"body":' + encoded + b',"xxh3":"' + checksum.encode() + b'"}\n')
    return checksum


def point(shelf: Path, name: str) -> None:
    """Have the pointer of a folder of checkpoints name one of them."""
    write_sealed(shelf / LATEST, {"name": name})


def body_of(path: Path) -> Any:
    return json.loads(path.read_bytes())["body"]


def reseal(path: Path, change: Callable[[Any], object]) -> str:
    """Change the body of a sealed file, and seal it anew: not damage, but a writer that says something else."""
    body = body_of(path)
    change(body)
    return write_sealed(path, body)


def reseal_index(folder: Path, rank: int, change: Callable[[Any], object]) -> None:
    """The same of a rank's index, which the manifest then names."""
    found = reseal(folder / index_name(rank), change)
    reseal(folder / MANIFEST, lambda body: body["seals"].__setitem__(rank, found))


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file, counted from its end where negative."""
    bit %= 8 * path.stat().st_size
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


def names(shelf: Path) -> list[str]:
    """The checkpoints that have their names, in order."""
    return sorted(path.name for path in shelf.glob("step_*") if path.suffix == "")


def verified(path: Path) -> int:
    """Read all of a checkpoint, or of the latest of a folder; its bytes. Raises `dzero.CheckpointError`."""
    reader = dzero.DcpReader(path)
    read(reader)
    return sum(file.stat().st_size for file in reader.path.glob("*.safetensors"))


def read(reader: dzero.DcpReader, only: str | None = None) -> dict[str, Tensor]:
    """Every tensor by its stored name, or one of them. Raises `dzero.CheckpointError`."""
    known = reader.read_metadata().state_dict_metadata
    asked = {
        name: torch.empty(told.size, dtype=told.properties.dtype)
        for name, told in known.items()
        if only in (None, name) and isinstance(told, dcp.metadata.TensorStorageMetadata)
    }
    try:
        dcp.load(asked, storage_reader=reader, no_dist=True)
    except dcp.CheckpointException as error:  # it wraps ours
        raise next(iter(error.failures.values()))[0] from None
    return asked


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> Tensor:
    """Random bits, NaNs and denormal numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def raw(tensor: Tensor) -> bytes:
    """Bits: a NaN is itself."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def mixed() -> dict[str, Tensor]:
    """Every dtype; scalars, tensors of nothing, smaller and larger than a block of a page."""
    small = [(), (0,), (1,), (3, 0, 2), (7,), (5, 3), (4, 3, 5), (2, 3, 2, 4)]
    dtypes, shapes = [*NAMES], [*small, (1100,), (130, 61), (3, 4099), (2000, 3)]
    return {f"t{n}": bits(dtypes[n % len(dtypes)], shape, n) for n, shape in enumerate(shapes)}


def scattered(draw: random.Random, tensors: Mapping[str, Tensor], ranks: int) -> list[dict[str, Piece]]:
    """All of `tensors`, each cut at random along any dim into boxes that lie with any rank, in any order."""
    found: list[dict[str, Piece]] = [{} for _ in range(ranks)]
    every = [(name, *box) for name, whole in tensors.items() for box in cut(draw, tuple(whole.shape), 5)]
    draw.shuffle(every)
    for number, (name, offset, size) in enumerate(every):
        found[draw.randrange(ranks)][f"{name}/{number}"] = piece(name, tensors[name], offset, size)
    return found


def cut(draw: random.Random, shape: tuple[int, ...], times: int) -> list[tuple[list[int], list[int]]]:
    """Offsets and sizes of boxes that make up `shape`, some of them empty."""
    boxes = [([0] * len(shape), [*shape])]
    for _ in range(times if shape else 0):
        offset, size = boxes.pop(draw.randrange(len(boxes)))
        dim = draw.randrange(len(shape))
        at = draw.randint(0, size[dim])
        for first, count in ((0, at), (at, size[dim] - at)):
            cut_offset, cut_size = [*offset], [*size]
            cut_offset[dim], cut_size[dim] = offset[dim] + first, count
            boxes.append((cut_offset, cut_size))
    return boxes
