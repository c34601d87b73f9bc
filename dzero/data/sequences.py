"""Sequences of a corpus, of which a stream takes some at a time.

Sequence i of a text is tokens[i*T : (i+1)*T + 1]: the first T tokens are inputs, the last T are targets. Neighboring
sequences share one token, so every token but the first is a target once, except fewer than T at the end.
"""

from __future__ import annotations

import zlib
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from dzero.data.batch import Batch
from dzero.data.tokens import Array, Tokens

FINGERPRINT_SEQUENCES = 64


class Sequences(Protocol):
    """Numbered sequences; `name` is that of the corpus in messages."""

    name: str

    def __len__(self) -> int:
        """Return the number of sequences."""

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Return the sequences `indices` [n] as one microbatch."""

    def counted(self, indices: NDArray[np.int64]) -> int:
        """Return the number of targets that count in the sequences `indices` [n]."""

    def identity(self) -> dict[str, int]:
        """Return what must be the same for a stream to continue over these sequences."""


class TextSequences:
    """Sequences of `length` tokens of a text, all of which count."""

    def __init__(self, tokens: Tokens | Array, length: int) -> None:
        self._tokens = tokens if isinstance(tokens, Tokens) else Tokens((tokens,))
        self.name, self.length = self._tokens.name, length
        if length < 1:
            raise ValueError(f"sequence_tokens={length}: must be a whole number ≥ 1")
        if len(self._tokens) < length + 1:
            raise ValueError(
                f"{self.name}: too short, {len(self._tokens)} tokens; one sequence of {length} and its "
                f"targets need {length + 1}; give more data, a shorter sequence, or another data.held_out"
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.length

    def read(self, indices: NDArray[np.int64]) -> Batch:
        """Implement `Sequences`."""
        block = np.empty((len(indices), self.length + 1), np.int64)
        for row, start in zip(block, (indices * self.length).tolist(), strict=True):
            row[:] = self._tokens[start : start + self.length + 1]
        rows = torch.from_numpy(block)
        return Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    def counted(self, indices: NDArray[np.int64]) -> int:
        """Implement `Sequences`."""
        return len(indices) * self.length

    def identity(self) -> dict[str, int]:
        """Return number and length of the sequences, and a checksum of some across the corpus."""
        step, checksum = max(1, len(self) // FINGERPRINT_SEQUENCES), 0
        for index in range(0, len(self), step):
            span = self._tokens[index * self.length : (index + 1) * self.length + 1]
            checksum = zlib.crc32(span.astype("<i8").tobytes(), checksum)
        return {"windows": len(self), "sequence_tokens": self.length, "crc32": checksum}
