"""Tokenized samples in a folder, memory-mapped.

    file           dtype                     one per
    ids.bin        uint16 or int32           token
    counts.bin     bool                      token, true for a target that counts
    lengths.bin    int64                     sample, its number of tokens
    counted.bin    int64                     sample, its number of targets that count
    hashes.bin     uint64                    sample, a hash of its ids
    meta.json      `SamplesMeta`             folder

The files hold whole samples. Samples are cut to `max_tokens` when they are read, so that another length of sequences
needs no tokenizing, and so that a sample is on the same side of the held-out split at every length.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dzero.utils.scratch_paths import reported_as_disk_error

META = "meta.json"
HASHES = np.dtype(np.uint64)
DTYPES: dict[str, np.dtype[Any]] = {
    "counts": np.dtype(np.bool_),
    "lengths": np.dtype(np.int64),
    "counted": np.dtype(np.int64),
    "hashes": HASHES,
}
"""Dtypes of the files besides `ids`."""

Lengths = NDArray[np.int64]


class SamplesMeta(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes of the files, and the rows that are not among the samples."""

    samples: int
    tokens: int
    dtype: str
    vocab_size: int
    bad_rows: int
    first_bad: str

    @property
    def dtypes(self) -> dict[str, np.dtype[Any]]:
        """Dtype of every file, by its name without suffix."""
        return {"ids": np.dtype(self.dtype), **DTYPES}

    def size_bytes(self, name: str) -> int:
        """Return the size of a file."""
        return (self.tokens if name in ("ids", "counts") else self.samples) * self.dtypes[name].itemsize


def read_meta(folder: Path) -> SamplesMeta | None:
    """Return the description of the samples in a folder; None unless all of its files are there, with their sizes."""
    try:
        meta = msgspec.json.decode((folder / META).read_bytes(), type=SamplesMeta)
        whole = all((folder / f"{name}.bin").stat().st_size == meta.size_bytes(name) for name in meta.dtypes)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
        return None
    return meta if whole else None


class Samples:
    """Samples that have at least one token that counts, in the order of the data.

    `len(samples)` is their number.

    Attributes:
        lengths: Number of tokens of each sample, int64 [n], at most `max_tokens`.
        counted: Number of tokens of each sample that are targets and count, int64 [n], at least 1.
        hashes: Hash of the ids of each whole sample, uint64 [n].
        vocab_size: One more than the largest id.
        summary: One line on what was read, left out and cut.
    """

    def __init__(self, folder: Path, meta: SamplesMeta, max_tokens: int | None) -> None:
        """Map the samples that `build_or_open` stored in a folder, whose files must be whole.

        Args:
            folder: Folder of the files.
            meta: What `read_meta(folder)` returned.
            max_tokens: Length to which longer samples are cut, at least 2; None for no limit.

        Raises:
            ValueError: No sample has a token that counts.
        """
        self.vocab_size = meta.vocab_size
        files = {name: _map(folder / f"{name}.bin", dtype) for name, dtype in meta.dtypes.items()}
        self._ids, self._counts = files["ids"], files["counts"]
        whole = np.array(files["lengths"])
        starts = np.cumsum(whole) - whole
        lengths = whole if max_tokens is None else np.minimum(whole, max_tokens)
        counted = np.array(files["counted"])
        for index in np.flatnonzero(lengths < whole):
            counted[index] = np.count_nonzero(self._counts[starts[index] + 1 : starts[index] + lengths[index]])
        kept = counted > 0
        self.summary = _summary(meta, whole, lengths, counted, max_tokens)
        if not kept.any():
            raise ValueError(f"no sample is left: {self.summary}; look at the data, data.loss_on and the length")
        self.lengths, self.counted = lengths[kept], counted[kept]
        self._starts, self.hashes = starts[kept], np.array(files["hashes"])[kept]

    def __len__(self) -> int:
        return len(self.lengths)

    def ids(self, index: int) -> NDArray[Any]:
        """Return the token ids of a sample, uint16 or int32 [lengths[index]], as a read-only view."""
        return self._span(self._ids, index)

    def counts(self, index: int) -> NDArray[np.bool_]:
        """Return which tokens of a sample are targets that count, bool [lengths[index]], as a read-only view."""
        return self._span(self._counts, index)

    def is_held_out(self, fraction: float) -> NDArray[np.bool_]:
        """Return which samples are held out, bool [n], at a fraction from 0 to less than 1.

        A hash of the ids of the whole sample decides, as `data.documents.is_held_out` does for documents: it depends on
        neither the machine nor the order nor the other samples, and copies of a sample are on the same side.
        """
        if not 0 <= fraction < 1:
            raise ValueError(f"fraction={fraction}: must be at least 0 and less than 1")
        return np.asarray(self.hashes < np.uint64(math.ceil(fraction * 2**64)), np.bool_)

    def _span(self, array: NDArray[Any], index: int) -> NDArray[Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = self._starts[index]
        return array[start : start + self.lengths[index]]


class SamplesWriter:
    """Writer of samples to an empty folder, batch after batch; `finish` makes the folder whole."""

    def __init__(self, folder: Path, dtype: np.dtype[Any], vocab_size: int) -> None:
        self._folder, self._vocab_size = folder, vocab_size
        self._dtypes = {"ids": dtype, **DTYPES}
        self.samples = self.tokens = 0
        with ExitStack() as undo, _reported(folder):
            self._files = {name: undo.enter_context((folder / f"{name}.bin").open("xb")) for name in self._dtypes}
            undo.pop_all()

    def add(self, batch: Sequence[tuple[NDArray[Any], NDArray[np.bool_]]]) -> None:
        """Append samples, each as ids [n] and which of them count [n]; raise DiskError if the disk is full."""
        values: dict[str, NDArray[Any]] = {
            "ids": np.concatenate([ids for ids, _ in batch]),
            "counts": np.concatenate([counts for _, counts in batch]),
            "lengths": np.array([len(ids) for ids, _ in batch]),
            "counted": np.array([np.count_nonzero(counts[1:]) for _, counts in batch]),
            "hashes": np.array([_hash(ids) for ids, _ in batch], HASHES),
        }
        with _reported(self._folder):
            for name, array in values.items():
                self._files[name].write(array.astype(self._dtypes[name]).tobytes())
        self.samples += len(batch)
        self.tokens += sum(len(ids) for ids, _ in batch)

    def finish(self, *, bad_rows: int, first_bad: str) -> SamplesMeta:
        """Bring the files to the disk, the description last, and return it."""
        meta = SamplesMeta(
            samples=self.samples,
            tokens=self.tokens,
            dtype=self._dtypes["ids"].name,
            vocab_size=self._vocab_size,
            bad_rows=bad_rows,
            first_bad=first_bad,
        )
        with _reported(self._folder):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            with (self._folder / META).open("xb") as file:
                file.write(msgspec.json.encode(meta))
                file.flush()
                os.fsync(file.fileno())
        self.close()
        return meta

    def close(self) -> None:
        """Close the files; what could not be written has already raised in `add` or `finish`."""
        for file in self._files.values():
            with suppress(OSError):
                file.close()


def _reported(folder: Path) -> AbstractContextManager[None]:
    return reported_as_disk_error(str(folder), "writing tokenized samples (free some space, or name another folder)")


def _hash(ids: NDArray[Any]) -> int:
    """Return the hash of a sample that decides whether it is held out; it does not depend on the dtype of the ids."""
    return int.from_bytes(hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8).digest(), "big")


def _map(path: Path, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.asarray(np.memmap(path, dtype=dtype, mode="r")) if path.stat().st_size else np.empty(0, dtype)


def _summary(meta: SamplesMeta, whole: Lengths, lengths: Lengths, counted: Lengths, max_tokens: int | None) -> str:
    """Return one line on all samples of a folder, cut to `lengths`, of which those without `counted` are left out."""
    kept = counted > 0
    said = [
        f"{np.count_nonzero(kept):,} samples, {lengths[kept].sum():,} tokens, {counted[kept].sum():,} of them counted"
    ]
    if meta.bad_rows:
        said.append(f"{meta.bad_rows:,} rows left out, the first: {meta.first_bad}")
    if cut := np.count_nonzero(lengths < whole):
        said.append(f"{cut:,} samples cut to {max_tokens} tokens, which loses {(whole - lengths).sum():,} tokens")
    if empty := np.count_nonzero(~kept):
        said.append(f"{empty:,} samples left out because no token of them counts")
    return "; ".join(said)
