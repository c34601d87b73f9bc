"""Format of a checkpoint: JSON files beside safetensors files, validated before use.

    step_00000200/
        manifest.json          seals of all ranks' indexes, and all values that are not tensors
        rank_00000.json        index: position of each part of a tensor in the rank's file, and block checksums
        rank_00000.safetensors the parts without gaps, in the order of the index

The tensors are listed in checkpoint/states.py. Scalars and settings are in the manifest. File names are derived from
the number of the rank, so that no path is ever read from a file.

JSON files are sealed: `{"body": …, "xxh3": "…"}`, with the checksum of the body's bytes. The checksum detects
accidental damage. `FileIndex.check` and `Manifest.check` protect against crafted files: sizes, offsets and shapes must
fit each other and the file before anything is allocated or read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import torch
import xxhash

from dzero.checkpoint.box import Box, covered
from dzero.checkpoint.errors import CheckpointDamaged, CheckpointError
from dzero.checkpoint.lineage import Lineage, Segment
from dzero.hardware import FILE_DTYPES
from dzero.offload.memory_pool import ALIGNMENT_BYTES

VERSION = 1
MOST_COUNT = 2**53
"""Largest count that is believed: up to here, fp64 has every whole number."""
MANIFEST = "manifest.json"
NUMBER = "$float"
MASTER, PARAM, BUFFER = "master", "param", "buffer"
"""Kinds of tensors, which prefix the name of a parameter or buffer; optimizer moments have kinds of their own."""
MOST_INDEX_BYTES, MOST_MANIFEST_BYTES = 64 << 20, 16 << 20
MOST_BLOCK_BYTES = 64 << 20
MOST_DIMS = 16
DTYPES = FILE_DTYPES
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SUM = re.compile(r"[0-9a-f]{16}")
T = TypeVar("T")


def index_name(rank: int) -> str:
    """Return the name of a rank's index file."""
    return f"rank_{rank:05d}.json"


def data_name(rank: int) -> str:
    """Return the name of a rank's tensor file."""
    return f"rank_{rank:05d}.safetensors"


class StoredBox(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A box of a tensor, and its position in a rank's file.

    Attributes:
        of: Name of the tensor, which has this `shape`; None if the box is a tensor of this rank alone.
        start: First byte of the row-major box in the data section of the file.
        end: Byte after the last one.
    """

    of: str | None
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    start: int
    end: int

    @classmethod
    def unplaced(cls, of: str | None, dtype: torch.dtype, shape: tuple[int, ...], box: Box | None = None) -> StoredBox:
        """Return a box of a tensor, by default all of it, without a position in the file."""
        box = box or Box.whole(shape)
        return cls(of, NAMES[dtype], shape, box.offset, box.size, 0, 0)

    @property
    def box(self) -> Box:
        """Position of the box in the tensor."""
        return Box(self.offset, self.size)

    @property
    def size_bytes(self) -> int:
        """Bytes of the box."""
        return self.box.elems * DTYPES[self.dtype].itemsize

    def check(self, name: str) -> None:
        """Raise ValueError if the fields are invalid or contradict each other."""
        if self.dtype not in DTYPES:
            raise ValueError(f"{name}: dtype {self.dtype!r}, not one of {list(DTYPES)}")
        if not len(self.shape) == len(self.offset) == len(self.size) <= MOST_DIMS:
            raise ValueError(f"{name}: shape {self.shape}, offset {self.offset} and size {self.size} differ in dims")
        if any(o < 0 or n < 0 or o + n > dim for o, n, dim in zip(self.offset, self.size, self.shape, strict=True)):
            raise ValueError(f"{name}: a part at {self.offset} of size {self.size} is not within {self.shape}")
        if math.prod(max(1, dim) for dim in self.shape) * DTYPES[self.dtype].itemsize >= 1 << 63:
            raise ValueError(f"{name}: no memory holds {self.dtype} {list(self.shape)}")
        if self.start < 0 or self.end - self.start != self.size_bytes:
            raise ValueError(f"{name}: bytes {self.start} to {self.end} are not {self.dtype} {list(self.size)}")


class FileIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Index of a rank's file.

    Attributes:
        data_start: Offset of the data section in the file.
        sums: Checksum of each block of `block_bytes`.
        parts: Boxes in the file, by entry.
    """

    rank: int
    file_bytes: int
    data_start: int
    block_bytes: int
    sums: tuple[str, ...]
    parts: dict[str, StoredBox]

    def check(self, rank: int) -> None:
        """Raise ValueError if the file is not that of `rank`, or the fields contradict each other."""
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
    """Description of a checkpoint: everything except its tensors.

    Older manifests lack the last three fields. Fields with default values are not encoded, so older checksums stay
    valid.

    Attributes:
        seals: Checksum of each rank's index.
        state: Values that are not tensors, as plain JSON. JSON has no infinity and no NaN, such as the best value of
            `ReduceLROnPlateau` before its first epoch: files have {"$float": "inf"} in their places.
        run: Id of the run that saved the checkpoint.
        lineage: Runs that this run continued from (checkpoint/lineage.py).
        saved_ns: Time of the save in nanoseconds since 1970.
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
        """Number of ranks that wrote the checkpoint."""
        return len(self.seals)

    def check(self) -> None:
        """Raise ValueError if the version is not supported or a field is invalid."""
        if self.version != VERSION:
            raise ValueError(f"version {self.version} of the format, this dzero reads {VERSION}: install a newer one")
        if not 0 <= self.saved_ns < 1 << 63:
            raise ValueError(f"saved_ns={self.saved_ns} is no time")
        if not self.seals or not 0 <= self.step <= MOST_COUNT or not all(map(SUM.fullmatch, self.seals)):
            raise ValueError(f"step {self.step} of {len(self.seals)} ranks")
        self.origin.check()

    @property
    def origin(self) -> Lineage:
        """Lineage of the run that saved the checkpoint."""
        return Lineage(self.run, self.lineage)


def check_together(indexes: list[FileIndex]) -> None:
    """Raise ValueError unless the parts of all ranks make up whole tensors, with each element once."""
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
    """Return the 64-bit xxh3 checksum of `data` in hexadecimal."""
    return xxhash.xxh3_64_hexdigest(data)


def _with_state(body: T, change: Callable[[Any], Any]) -> T:
    return msgspec.structs.replace(body, state=change(body.state)) if isinstance(body, Manifest) else body


def _spelled(value: Any) -> Any:
    """Return a plain value with each float that JSON lacks as a text under `NUMBER`."""
    if isinstance(value, dict):
        return {key: _spelled(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spelled(element) for element in value]
    return {NUMBER: str(float(value))} if isinstance(value, float) and not math.isfinite(value) else value


def _read(value: Any) -> Any:
    """Return the value that `_spelled` was given."""
    if isinstance(value, list):
        return [_read(element) for element in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {NUMBER} and value[NUMBER] in ("inf", "-inf", "nan"):
        return float(value[NUMBER])
    return {key: _read(element) for key, element in value.items()}


class _Sealed(msgspec.Struct, forbid_unknown_fields=True):
    body: msgspec.Raw
    xxh3: str


def seal(body: Any) -> tuple[bytes, str]:
    """Return the bytes of a file that holds `body`, and its seal."""
    encoded = msgspec.json.encode(_with_state(body, _spelled), order="sorted")
    found = digest(encoded)
    return b'{"body":' + encoded + b',"xxh3":"' + found.encode() + b'"}\n', found


def unseal(data: bytes, kind: type[T], path: str, sealed: str | None = None) -> T:
    """Return the body of a sealed file, whose seal must be `sealed` unless that is None.

    Raises:
        CheckpointDamaged: If the bytes are not those that were written.
        CheckpointError: If the body is not a valid `kind`.
    """
    try:
        outer = msgspec.json.decode(data, type=_Sealed)
        found = digest(bytes(outer.body))
    except (ValueError, ArithmeticError, RecursionError) as error:  # msgspec's errors are subclasses of ValueError
        raise CheckpointDamaged(path, str(error)) from error
    if found != outer.xxh3:
        raise CheckpointDamaged(path, f"its checksum is {found}, not {outer.xxh3}: it was damaged")
    if sealed is not None and found != sealed:
        raise CheckpointDamaged(path, f"it has seal {found}, the manifest names {sealed}: it is of another checkpoint")
    try:
        body = _with_state(msgspec.json.decode(bytes(outer.body), type=kind), _read)
        again = seal(body)[0]
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(path, str(error)) from error
    if again != data:
        what = "it is not what dzero writes: cut short, keys twice, spaces, or numbers out of range"
        raise CheckpointDamaged(path, what)
    return body
