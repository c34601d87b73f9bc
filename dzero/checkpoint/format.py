"""What lies in a checkpoint: JSON beside safetensors files, read without trusting it.

    step_00000200/
        manifest.json          how many ranks wrote it, the seals of their indexes, and what is no tensor
        rank_00000.json        an index: which part of which tensor lies where in the rank's file, and its checksums
        rank_00000.safetensors the parts, one after the other, in the order of the index

What the tensors are: states.py. Scalars and settings are in the manifest. Names of files follow from the number of a
rank, so no path comes out of a file.

JSON files are sealed: `{"body": …, "xxh3": "…"}`, the checksum of the body's bytes. It finds what disks and cables do
to a file; against who writes one on purpose stand the checks in `FileIndex.check` and `Manifest.check`: sizes, offsets
and shapes must fit each other and the file before anything is allocated or read.
"""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import msgspec
import xxhash

from dzero.checkpoint.box import Box, covered
from dzero.checkpoint.errors import CheckpointDamaged, CheckpointError
from dzero.checkpoint.lineage import Lineage, Segment
from dzero.hardware import FILE_DTYPES
from dzero.offload.memory_pool import ALIGNMENT_BYTES

VERSION = 1
MANIFEST = "manifest.json"
MASTER, PARAM, BUFFER = "master", "param", "buffer"
"""Kinds of tensors, before a parameter's or buffer's name; an optimizer's moments have kinds of their own."""
MOST_INDEX_BYTES, MOST_MANIFEST_BYTES = 64 << 20, 16 << 20
MOST_BLOCK_BYTES = 64 << 20
MOST_DIMS = 16
DTYPES = FILE_DTYPES
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUM = re.compile(r"[0-9a-f]{16}")
T = TypeVar("T")


def index_name(rank: int) -> str:
    """Of a rank's index."""
    return f"rank_{rank:05d}.json"


def data_name(rank: int) -> str:
    """Of a rank's tensors."""
    return f"rank_{rank:05d}.safetensors"


class StoredBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of the tensor `of`, which has `shape`, row-major at bytes [start, end) of the file's data.

    Where `of` is None it is no part of a tensor that ranks share, but the rank's own.
    """

    of: str | None
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    end: int

    @property
    def box(self) -> Box:
        """Where it lies in the tensor."""
        return Box(self.offset, self.size)

    def check(self, name: str) -> None:
        """Raises ValueError for one that contradicts itself."""
        if self.dtype not in DTYPES:
            raise ValueError(f"{name}: dtype {self.dtype!r}, not one of {list(DTYPES)}")
        if not len(self.shape) == len(self.offset) == len(self.size) <= MOST_DIMS:
            raise ValueError(f"{name}: shape {self.shape}, offset {self.offset} and size {self.size} differ in dims")
        if any(o < 0 or n < 0 or o + n > dim for o, n, dim in zip(self.offset, self.size, self.shape, strict=True)):
            raise ValueError(f"{name}: a part at {self.offset} of size {self.size} is not within {self.shape}")
        if math.prod(max(1, dim) for dim in self.shape) * DTYPES[self.dtype].itemsize >= 1 << 63:
            raise ValueError(f"{name}: no memory holds {self.dtype} {list(self.shape)}")
        if self.start < 0 or self.end - self.start != math.prod(self.size) * DTYPES[self.dtype].itemsize:
            raise ValueError(f"{name}: bytes {self.start} to {self.end} are not {self.dtype} {list(self.size)}")


class FileIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rank's file: its size, where its data begins, the checksum of every block of `block_bytes`, and its parts."""

    rank: int
    file_bytes: int
    data_start: int
    block_bytes: int
    sums: tuple[str, ...]
    parts: dict[str, StoredBox]

    def check(self, rank: int) -> None:
        """Raises ValueError where its numbers do not fit each other."""
        if self.rank != rank:
            raise ValueError(f"it says it is rank {self.rank}'s")
        if (
            not 1 <= self.block_bytes <= MOST_BLOCK_BYTES
            or self.block_bytes % ALIGNMENT_BYTES
            or not 8 <= self.data_start <= self.file_bytes
        ):
            raise ValueError(f"blocks of {self.block_bytes} bytes, data from {self.data_start} of {self.file_bytes}")
        if len(self.sums) != -(-self.file_bytes // self.block_bytes) or not all(map(SUM.fullmatch, self.sums)):
            raise ValueError(f"{len(self.sums)} checksums for {self.file_bytes} bytes in blocks of {self.block_bytes}")
        at = 0
        for name, part in sorted(self.parts.items(), key=lambda item: (item[1].start, item[1].end)):
            part.check(name)
            if part.start != at:
                raise ValueError(f"{name} starts at byte {part.start} where the part before ends at {at}")
            at = part.end
        if self.data_start + at != self.file_bytes:
            raise ValueError(f"its parts end at byte {self.data_start + at} of {self.file_bytes}")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A checkpoint's description: everything but its tensors.

    `seals`: the checksums of the ranks' indexes, by rank. `state`: what is no tensor; plain JSON. `run`, `lineage`:
    which start of a run saved it, and from what that had resumed (lineage.py). `saved_ns`: nanoseconds since 1970.
    Manifests that lack the last three are older; their checksums hold because defaults are left out.
    """

    version: int
    step: int
    seals: tuple[str, ...]
    state: dict[str, Any]
    run: str = ""
    lineage: tuple[Segment, ...] = ()
    saved_ns: int = 0

    @property
    def ranks(self) -> int:
        """How many wrote it."""
        return len(self.seals)

    def check(self) -> None:
        """Raises ValueError for another version, or no ranks."""
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the format, this dzero reads {VERSION}: install a newer one")
        if not self.seals or self.step < 0 or not all(map(SUM.fullmatch, self.seals)):
            raise ValueError(f"step {self.step} of {len(self.seals)} ranks")
        self.origin.check()

    @property
    def origin(self) -> Lineage:
        """Return the lineage of the run that saved the checkpoint."""
        return Lineage(self.run, self.lineage)


def check_together(indexes: list[FileIndex]) -> None:
    """Raises ValueError where the ranks' parts do not make up whole tensors, each element once."""
    boxes: dict[str, list[Box]] = {}
    first: dict[str, StoredBox] = {}
    for index in indexes:
        for part in index.parts.values():
            if part.of is None:
                continue
            like = first.setdefault(part.of, part)
            if (part.shape, part.dtype) != (like.shape, like.dtype):
                raise ValueError(f"{part.of} is {like.dtype} {list(like.shape)} and {part.dtype} {list(part.shape)}")
            boxes.setdefault(part.of, []).append(part.box)
    for name, of_name in boxes.items():
        try:
            there, all_of_it = covered([box for box in of_name if box.elems]), math.prod(first[name].shape)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if there != all_of_it:
            raise ValueError(f"{name}: {there} of {all_of_it} elements are there")


def digest(data: bytes | memoryview) -> str:
    """xxh3 in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    body: msgspec.Raw
    xxh3: str


def seal(body: Any) -> tuple[bytes, str]:
    """The bytes of a file that holds `body`, and its seal."""
    encoded = msgspec.json.encode(body, order="sorted")
    found = digest(encoded)
    return b'{"body":' + encoded + b',"xxh3":"' + found.encode() + b'"}\n', found


def unseal(data: bytes, kind: type[T], path: str, sealed: str | None = None) -> T:
    """What `seal` was given. `sealed`: the seal that it must have.

    Raises Damaged where the bytes are not those that were written, CheckpointError where they say what they may not.
    """
    try:
        outer = msgspec.json.decode(data, type=_Sealed)
        found = digest(bytes(outer.body))
    except (ValueError, ArithmeticError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointDamaged(path, str(error)) from error
    if found != outer.xxh3:
        raise CheckpointDamaged(path, f"its checksum is {found}, not {outer.xxh3}: it was damaged")
    if sealed is not None and found != sealed:
        raise CheckpointDamaged(path, f"it has seal {found}, the manifest names {sealed}: it is of another checkpoint")
    try:
        body = msgspec.json.decode(bytes(outer.body), type=kind)
        again = seal(body)[0]
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(path, str(error)) from error
    if again != data:
        what = "it is not what dzero writes: cut short, keys twice, spaces, or numbers out of range"
        raise CheckpointDamaged(path, what)
    return body
