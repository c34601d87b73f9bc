"""Sequences made of samples of their own length: packed, several to a sequence, or padded, one to a sequence.

    packed    [sample 3 | sample 0 | rest]    positions restart in each sample; attention stays inside it
    padded    [sample 3 | rest]               as long as the longest sample of the microbatch

A sample of n tokens takes n - 1 places: token i is the input whose target is token i + 1. The rest has targets that do
not count.

Samples are packed once, by best fit in order of decreasing length, so that a sequence keeps its samples in every epoch
and its number says all about it. Best fit leaves at most 11/9 of the fewest possible sequences (Johnson 1974).
"""

from __future__ import annotations

import zlib
from bisect import bisect_left, insort
from collections import defaultdict
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dzero.data.batch import IGNORED, Batch
from dzero.data.tokens import Array


class Samples(Protocol):
    """Encoded samples.

    Attributes:
        lengths: Number of tokens of each, int64 [samples].
        counted: Number of targets that count in each, int64 [samples].
        hashes: Hash of the ids of each, uint64 [samples].
    """

    lengths: NDArray[np.int64]
    counted: NDArray[np.int64]
    hashes: NDArray[np.uint64]

    def ids(self, index: int) -> Array:
        """Return the token ids of a sample, [n]."""

    def counts(self, index: int) -> NDArray[np.bool_]:
        """Return which of a sample's tokens count as targets, [n]."""


class SampleSequences:
    """Sequences of at most `length` tokens, each of one or several of the samples `chosen` [n].

    Args:
        samples: All samples, each of at most `length` + 1 tokens.
        chosen: Those to take.
        length: Tokens of a sequence.
        pack: Pack several samples into a sequence; else each has its own.
        multiple: Padded sequences have a multiple of this many tokens; 0: always `length`.
        name: Name of the samples in messages.

    Raises:
        ValueError: If there is no sample.
    """

    def __init__(
        self, samples: Samples, chosen: NDArray[np.int64], length: int, *, pack: bool, multiple: int, name: str
    ) -> None:
        self._samples, self._length, self._pack, self._multiple, self.name = samples, length, pack, multiple, name
        if not len(chosen):
            raise ValueError(f"{name}: there is no sample; give more data, or another data.held_out")
        places = samples.lengths[chosen] - 1
        groups = best_fit(places, length) if pack else [[index] for index in range(len(chosen))]
        self._members = [chosen[group] for group in groups]
        self._counted = np.array([samples.counted[group].sum() for group in self._members], np.int64)

    def __len__(self) -> int:
        return len(self._members)

    def counted(self, indices: NDArray[np.int64]) -> int:
        """Implement `Sequences`."""
        return int(self._counted[indices].sum())

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Implement `Sequences`."""
        members = [self._members[index].tolist() for index in indices.tolist()]
        shape = len(members), self._tokens_of(members)
        tokens, targets = np.zeros(shape, np.int64), np.full(shape, IGNORED, np.int64)
        positions = np.broadcast_to(np.arange(shape[1]), shape).copy()
        for row, of_row in enumerate(members):
            start = 0
            for index in of_row:
                ids = self._samples.ids(index).astype(np.int64)
                counts, end = self._samples.counts(index)[1:], start + len(ids) - 1
                tokens[row, start:end] = ids[:-1]
                targets[row, start:end] = np.where(counts, ids[1:], IGNORED)
                positions[row, start:end] = np.arange(len(ids) - 1)
                start = end
            positions[row, start:] = np.arange(shape[1] - start)
        packed = torch.from_numpy(positions) if self._pack else None
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), packed)

    def identity(self) -> dict[str, int]:
        """Return number, length and kind of the sequences, and a checksum of their samples and of what counts."""
        checksum = 0
        for of_row in self._members:
            checksum = zlib.crc32(of_row.astype("<i8").tobytes(), checksum)
            checksum = zlib.crc32(self._samples.hashes[of_row].tobytes(), checksum)
        checksum = zlib.crc32(self._counted.tobytes(), checksum)
        return {
            "windows": len(self),
            "sequence_tokens": self._length,
            "crc32": checksum,
            "pack": int(self._pack),
        }

    def _tokens_of(self, members: list[list[int]]) -> int:
        """Return the tokens of the sequences that hold these samples."""
        if self._pack or not self._multiple:
            return self._length
        longest = max(int(self._samples.lengths[index]) - 1 for of_row in members for index in of_row)
        return min(self._length, -(-longest // self._multiple) * self._multiple)


def best_fit(sizes: NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Return groups of indices whose `sizes` [n], each at most `capacity`, add up to at most `capacity`.

    In order of decreasing size, each goes to the group with the least room that it fits into.
    """
    groups: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []  # keys of `with_room`, sorted
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        at = bisect_left(rooms, size)
        if at == len(rooms):
            group, room = len(groups), capacity
            groups.append([])
        else:
            room = rooms[at]
            group = with_room[room].pop()
            if not with_room[room]:
                del rooms[at]
        groups[group].append(index)
        if room := room - size:
            if not with_room[room]:
                insort(rooms, room)
            with_room[room].append(group)
    return groups
