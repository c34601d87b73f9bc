"""Sequences of several sources, of which a stream takes some of each in proportion to weights.

    sample s of the run     belongs to the source whose count split(s + 1) is one more than its count split(s)
    its number there        that count before it: sample n of source j is position n mod W_j of epoch n div W_j,
                            with W_j sequences in the source

So a source that ends before the others starts its next epoch, in a new order. Which sample is of which source follows
from its number alone, and needs neither a state nor random numbers: a run resumes at any sample, on any number of
ranks.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dzero.data.batch import IGNORED, Batch
from dzero.data.order import in_epochs
from dzero.data.sequences import Sequences
from dzero.data.stream import SequenceStream, SourceUse

Indices = NDArray[np.int64]


class MixedSequences:
    """The sequences of all sources as one list, source after source.

    Args:
        sources: Sequences of each source, by its name.
        weights: Weight of each, at least 0 with a sum above 0. None: the number of its sequences.

    Attributes:
        sources: Sequences by name.
        shares: Weights as whole numbers without a common divisor.
        starts: Index of the first sequence of each source, int64 [sources].
    """

    def __init__(self, sources: Mapping[str, Sequences], weights: Sequence[float] | None) -> None:
        self.sources, self.name = dict(sources), " and ".join(each.name for each in sources.values())
        sizes = [len(each) for each in sources.values()]
        self.shares = shares_of(sizes if weights is None else weights)
        self.starts = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        self._len = sum(sizes)

    def __len__(self) -> int:
        return self._len

    def read(self, indices: Indices) -> Batch:
        """Implement `Sequences`. Padded sequences of several sources are as long as the longest of them."""
        owners = self._owners(indices)
        found = {
            number: source.read(indices[owners == number] - self.starts[number])
            for number, source in enumerate(self.sources.values())
            if (owners == number).any()
        }
        if len(found) == 1:
            return next(iter(found.values()))
        shape = len(indices), max(batch.tokens.shape[1] for batch in found.values())
        tokens, targets = torch.zeros(shape, dtype=torch.int64), torch.full(shape, IGNORED)
        packed = all(batch.positions is not None for batch in found.values())
        positions = torch.zeros(shape, dtype=torch.int64) if packed else None
        for number, batch in found.items():
            rows, length = torch.from_numpy(np.flatnonzero(owners == number)), batch.tokens.shape[1]
            tokens[rows, :length], targets[rows, :length] = batch.tokens, batch.targets
            if positions is not None and batch.positions is not None:
                positions[rows, :length] = batch.positions
        return Batch(tokens, targets, positions)

    def counted(self, indices: Indices) -> int:
        """Implement `Sequences`."""
        return sum(self.counted_by_source(indices).values())

    def counted_by_source(self, indices: Indices) -> dict[str, int]:
        """Return the number of targets that count in the sequences `indices` [n], by source."""
        owners = self._owners(indices)
        return {
            name: source.counted(indices[owners == number] - self.starts[number])
            for number, (name, source) in enumerate(self.sources.items())
        }

    def identity(self) -> dict[str, int]:
        """Return the number of sequences and their length, and checksums of the sources and of their weights."""
        parts = [source.identity() for source in self.sources.values()]
        return {
            "windows": len(self),
            "sequence_tokens": parts[0]["sequence_tokens"],
            "crc32": _checksum(parts),
            "sources": len(parts),
            "weights": _checksum(self.shares),
        }

    def _owners(self, indices: Indices) -> NDArray[np.intp]:
        """Return the number of the source of each sequence."""
        return np.searchsorted(self.starts, indices, side="right") - 1


class MixtureStream(SequenceStream):
    """Stream over the sequences of several sources; an epoch has as many samples as they have sequences together.

    Source number j shuffles with `seed` + j.
    """

    sequences: MixedSequences

    def use(self, microbatches: int) -> dict[str, SourceUse]:
        """Return what the next `microbatches` of all ranks take of each source."""
        samples = microbatches * self.ranks * self.microbatch_sequences
        counted = self.sequences.counted_by_source(self._indices(self.samples, samples))
        taken = split(np.array([self.samples + samples]), self.sequences.shares)[:, 0].tolist()
        sources = self.sequences.sources.items()
        return {
            name: SourceUse(counted[name], count / len(source))
            for (name, source), count in zip(sources, taken, strict=True)
        }

    def _indices(self, first: int, samples: int) -> Indices:
        before = split(np.arange(first, first + samples + 1), self.sequences.shares)
        found = np.empty(samples, np.int64)
        for number, (counts, source) in enumerate(zip(before, self.sequences.sources.values(), strict=True)):
            mine = np.flatnonzero(np.diff(counts))
            own = in_epochs(counts[mine], windows=len(source), seed=self.seed + number, shuffle=self.shuffle)
            found[mine] = self.sequences.starts[number] + own
        return found


def stream_over(sequences: Sequences, **options: Any) -> SequenceStream:
    """Return the stream over the sequences of one source or of several; `options` are those of `SequenceStream`."""
    return (MixtureStream if isinstance(sequences, MixedSequences) else SequenceStream)(sequences, **options)


def shares_of(weights: Sequence[float]) -> list[int]:
    """Return whole numbers in the proportions of the weights, exactly as these are written in decimals."""
    fractions = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(each.denominator for each in fractions))
    shares = [int(each * common) for each in fractions]
    divisor = math.gcd(*shares)
    return [share // divisor for share in shares]


def split(samples: Indices, shares: Sequence[int]) -> Indices:
    """Return how many of the first `samples` [n] of a run belong to each source, int64 [sources, n].

    The first source has its rounded share of all samples, the second its rounded share of the others, and so on. So
    each sample belongs to one source, and every stretch of samples has each share up to a few samples. The numbers are
    Python's, which do not overflow.
    """
    left, rest, counts = samples.astype(object), sum(shares), []
    for share in shares[:-1]:
        mine = (2 * share * left + rest) // (2 * rest) if rest else 0 * left
        counts.append(mine)
        left, rest = left - mine, rest - share
    return np.stack([*counts, left]).astype(np.int64)


def _checksum(value: Any) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
