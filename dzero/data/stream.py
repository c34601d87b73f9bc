"""Resumable streams: every sequence of a corpus once per epoch, over any number of ranks.

    sample s    s-th sequence of the run: position s mod W of epoch s div W, with W sequences per epoch
    step        takes the next `microbatch_sequences * ranks` samples; rank r takes the r-th slice of them

The order of samples does not depend on the ranks, so the whole state of a stream is the number of samples consumed.
A resume on other ranks continues the same order. An epoch whose end does not fill a step continues in the next epoch.
Any position of any epoch costs about a microsecond (`data/order.py`), so a resumed run replays nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dzero.data.batch import IGNORED, Batch
from dzero.data.order import in_epochs
from dzero.data.sequences import Sequences

CHECKSUMS = {"crc32": "the samples or their order in the data changed", "weights": "data.weights changed"}
"""What a difference means, of the properties of a stream that are checksums."""
MOST_SAMPLES = 2**62
EMPTY = -1
"""Index of a place without a sequence."""


class SourceUse(NamedTuple):
    """Use of one source of a mixture by a stream.

    Attributes:
        tokens: Number of targets that counted in a step, or in several.
        epochs: Passes over the source since the beginning of the run, including these steps.
    """

    tokens: int
    epochs: float


class SequenceStream:
    """Endless microbatches of one rank of a data-parallel group; the module's docstring defines samples.

    Without `shuffle`, every epoch is in the order of the corpus.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        microbatch_sequences: int,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        _check_slice(microbatch_sequences, rank, ranks)
        if seed < 0:
            raise ValueError(f"seed={seed}: must be a whole number ≥ 0")
        self.sequences, self.per_epoch = sequences, len(sequences)
        self.microbatch_sequences = microbatch_sequences
        self.rank, self.ranks = rank, ranks
        self.seed, self.shuffle = seed, shuffle
        self.samples = 0

    def next(self) -> Batch:
        """Return the next microbatch."""
        batch = self.peek()
        self.skip()
        return batch

    def peek(self) -> Batch:
        """Return the next microbatch without moving the stream."""
        first = self.samples + self.rank * self.microbatch_sequences
        return self.sequences.read(self._indices(first, self.microbatch_sequences))

    def skip(self) -> None:
        """Move past the next microbatch of all ranks."""
        self.samples += self.ranks * self.microbatch_sequences

    def counted(self, microbatches: int) -> int:
        """Return the number of targets that count in the next `microbatches` of all ranks together."""
        return self.sequences.counted(
            self._indices(self.samples, microbatches * self.ranks * self.microbatch_sequences)
        )

    def use(self, microbatches: int) -> dict[str, SourceUse]:
        """Return what the next `microbatches` of all ranks take of each source; empty unless there are several."""
        return {}

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.samples // self.per_epoch

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the properties that the stream it is loaded into must have.

        The position is `epoch`, and the samples that all ranks consumed in it. The state does not depend on ranks and
        microbatches, and is the same on every rank between steps.
        """
        return {"epoch": self.epoch, "position": self.samples % self.per_epoch} | self._identity()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue exactly where `state` was taken, on any number of ranks.

        Another corpus, sequence length, seed or shuffling is an error, and leaves the stream unchanged.
        """
        identity = self._identity()
        if missing := sorted({"epoch", "position", *identity} - state.keys()):
            raise ValueError(
                f"the state of the token stream lacks {missing}: it was saved over another number of sources, or not "
                "made by state_dict()"
            )
        if drifted := [key for key in identity if state[key] != identity[key]]:
            changes = ", ".join(CHECKSUMS.get(key, f"{key} was {state[key]} and is {identity[key]}") for key in drifted)
            raise ValueError(
                f"{self.sequences.name}: the stream was saved over other data ({changes}); an exact resume "
                "needs the same data, data settings, sequence length and seed"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] < self.per_epoch:
            raise ValueError(
                f"the token stream cannot stand at epoch {state['epoch']}, position {state['position']}: "
                f"positions are 0 to {self.per_epoch - 1}"
            )
        samples = state["epoch"] * self.per_epoch + state["position"]
        if samples > MOST_SAMPLES:
            raise ValueError(f"the token stream cannot stand at epoch {state['epoch']}: no run reads {samples} samples")
        self.samples = samples

    def _indices(self, first: int, samples: int) -> NDArray[np.int64]:
        """Return the sequence of each of `samples` samples from `first` on; they may cross the end of an epoch."""
        numbers = np.arange(first, first + samples)
        return in_epochs(numbers, windows=self.per_epoch, seed=self.seed, shuffle=self.shuffle)

    def _identity(self) -> dict[str, int]:
        return {"seed": self.seed, "shuffle": int(self.shuffle)} | self.sequences.identity()


def evaluation_batches(
    sequences: Sequences,
    *,
    microbatch_sequences: int,
    rank: int,
    ranks: int,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Return one rank's microbatches of held-out sequences: as many on every rank, no sequence twice.

    At most `max_batches` are returned; None means as many as fit. The sequences are spread evenly, in order. The
    remainder that does not fill a step of all ranks is left out. If all of them do not fill one step, the places that
    are left get a sequence in which nothing counts.
    """
    _check_slice(microbatch_sequences, rank, ranks)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches={max_batches}: must be a whole number ≥ 1, or None for all")
    count, per_step = len(sequences), microbatch_sequences * ranks
    steps = max(1, min(max_batches or count, count // per_step))
    places = np.arange(steps * per_step)
    chosen = places * count // (steps * per_step) if count >= per_step else np.where(places < count, places, EMPTY)
    mine = chosen.reshape(steps, ranks, microbatch_sequences)[:, rank]
    return (_read(sequences, indices) for indices in mine)


def _read(sequences: Sequences, indices: NDArray[np.int64]) -> Batch:
    batch = sequences.read(np.maximum(indices, 0))
    batch.targets[torch.from_numpy(indices == EMPTY)] = IGNORED
    return batch


def _check_slice(microbatch_sequences: int, rank: int, ranks: int) -> None:
    if microbatch_sequences < 1:
        raise ValueError(f"microbatch_sequences={microbatch_sequences}: must be a whole number ≥ 1")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} of ranks={ranks}: a rank is 0 to ranks - 1")
