"""Resumable token streams: every window of a corpus once per epoch, over any number of ranks.

    window i    tokens[i*T : (i+1)*T + 1]: the first T tokens are inputs, the last T are targets. Neighboring windows
                share one token, so every token but the first is a target once, except fewer than T at the end
    sample s    s-th window of the run: position s mod W of epoch s div W, with W windows per epoch
    step        takes the next `microbatch_sequences * ranks` samples; rank r takes the r-th slice of them

The order of samples does not depend on the ranks, so the whole state of a stream is the number of samples consumed.
A resume on other ranks continues the same order. An epoch whose end does not fill a step continues in the next epoch.

Note: order of an epoch. It is a permutation that is computed on demand and never stored.

A Feistel network maps 2b-bit numbers one to one for any round function: (left, right) becomes (right, left ^ f(right)),
which is invertible. The network permutes [0, 4^b) for the smallest 4^b >= windows. A value that lands outside
[0, windows) passes through the network again until it lands inside ("cycle walking"). The map stays one to one, and
takes fewer than four passes on average.

So any position of any epoch costs about a microsecond and no memory, and a resumed run replays nothing. The order
depends only on (windows, seed, epoch). The keys come from numpy's SeedSequence, whose values numpy guarantees for all
versions, unlike those of `Generator.permutation`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

from dzero.data.tokens import Array, Tokens

FINGERPRINT_WINDOWS = 64
ROUNDS = 8
LEAST_HALF_BITS = 3

Batch = tuple[torch.Tensor, torch.Tensor]


class TokenStream:
    """Endless microbatches of one rank of a data-parallel group; the module's docstring defines windows and samples.

    Without `shuffle`, every epoch is in the order of the corpus. Tokens that do not fill one window are an error.
    """

    def __init__(
        self,
        tokens: Tokens | Array,
        *,
        sequence_tokens: int,
        microbatch_sequences: int,
        rank: int,
        ranks: int,
        seed: int,
        shuffle: bool = True,
    ) -> None:
        _check_slice(microbatch_sequences, rank, ranks)
        if seed < 0:
            raise ValueError(f"seed={seed}: must be a whole number ≥ 0")
        self.tokens = _as_run(tokens)
        self.windows = count_windows(self.tokens, sequence_tokens)
        self.sequence_tokens = sequence_tokens
        self.microbatch_sequences = microbatch_sequences
        self.rank, self.ranks = rank, ranks
        self.seed, self.shuffle = seed, shuffle
        self.samples = 0

    def next(self) -> Batch:
        """Return the next (inputs, targets), both int64 CPU tensors [microbatch_sequences, sequence_tokens]."""
        batch = self.peek()
        self.skip()
        return batch

    def peek(self) -> Batch:
        """Return the next microbatch without moving the stream."""
        first = self.samples + self.rank * self.microbatch_sequences
        samples = np.arange(first, first + self.microbatch_sequences)
        return read_windows(self.tokens, self._windows_of(samples), self.sequence_tokens)

    def skip(self) -> None:
        """Move past the next microbatch of all ranks."""
        self.samples += self.ranks * self.microbatch_sequences

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.samples // self.windows

    def state_dict(self) -> dict[str, int]:
        """Return the position, and the properties that the stream it is loaded into must have.

        The position is `epoch`, and the samples that all ranks consumed in it. The state does not depend on ranks and
        microbatches, and is the same on every rank between steps.
        """
        return {"epoch": self.epoch, "position": self.samples % self.windows} | self._identity()

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue exactly where `state` was taken, on any number of ranks.

        Another corpus, sequence length, seed or shuffling is an error, and leaves the stream unchanged.
        """
        identity = self._identity()
        if missing := sorted({"epoch", "position", *identity} - state.keys()):
            raise ValueError(f"the state of the token stream lacks {missing}; it was not made by state_dict()")
        if drifted := [key for key in identity if state[key] != identity[key]]:
            changes = ", ".join(f"{key} was {state[key]} and is {identity[key]}" for key in drifted)
            raise ValueError(
                f"{self.tokens.name}: the stream was saved over other data ({changes}); an exact resume "
                "needs the same data, data settings, sequence length and seed"
            )
        if state["epoch"] < 0 or not 0 <= state["position"] < self.windows:
            raise ValueError(
                f"the token stream cannot stand at epoch {state['epoch']}, position {state['position']}: "
                f"positions are 0 to {self.windows - 1}"
            )
        self.samples = state["epoch"] * self.windows + state["position"]

    def _windows_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the window of each sample [n]; a microbatch may cross the end of an epoch."""
        epochs, positions = np.divmod(samples, self.windows)
        if not self.shuffle:
            return positions
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            positions[here] = shuffled(positions[here], windows=self.windows, seed=self.seed, epoch=epoch)
        return positions

    def _identity(self) -> dict[str, int]:
        """Return the properties that determine the order of samples, with a checksum of windows across the corpus."""
        step = max(1, self.windows // FINGERPRINT_WINDOWS)
        checksum = 0
        for window in range(0, self.windows, step):
            start = window * self.sequence_tokens
            span = self.tokens[start : start + self.sequence_tokens + 1]
            checksum = zlib.crc32(span.astype("<i8").tobytes(), checksum)
        return {
            "seed": self.seed,
            "shuffle": int(self.shuffle),
            "windows": self.windows,
            "sequence_tokens": self.sequence_tokens,
            "crc32": checksum,
        }


def evaluation_batches(
    tokens: Tokens | Array,
    *,
    sequence_tokens: int,
    microbatch_sequences: int,
    rank: int,
    ranks: int,
    max_batches: int | None = None,
) -> Iterator[Batch]:
    """Return one rank's microbatches of held-out tokens: as many on every rank, no window twice, no padding.

    At most `max_batches` are returned; None means as many as fit. The windows are spread evenly over the tokens, in
    order. The remainder that does not fill a step of all ranks is left out. The call itself raises ValueError if the
    tokens do not fill one step.
    """
    _check_slice(microbatch_sequences, rank, ranks)
    if max_batches is not None and max_batches < 1:
        raise ValueError(f"max_batches={max_batches}: must be a whole number ≥ 1, or None for all")
    run = _as_run(tokens)
    windows = count_windows(run, sequence_tokens)
    step_windows = microbatch_sequences * ranks
    if windows < step_windows:
        raise ValueError(
            f"{run.name}: {len(run)} tokens make {windows} windows of {sequence_tokens}, but one evaluation step "
            f"takes {microbatch_sequences} on each of {ranks} ranks; give more data, raise data.held_out, or take "
            "shorter or fewer sequences"
        )
    steps = min(max_batches or windows, windows // step_windows)
    chosen = np.arange(steps * step_windows) * windows // (steps * step_windows)
    mine = chosen.reshape(steps, ranks, microbatch_sequences)[:, rank]
    return (read_windows(run, indices, sequence_tokens) for indices in mine)


def count_windows(tokens: Tokens, sequence_tokens: int) -> int:
    """Return the number of windows of `sequence_tokens` tokens; raise ValueError if there is none."""
    if sequence_tokens < 1:
        raise ValueError(f"sequence_tokens={sequence_tokens}: must be a whole number ≥ 1")
    if len(tokens) < sequence_tokens + 1:
        raise ValueError(
            f"{tokens.name}: too short, {len(tokens)} tokens; one sequence of {sequence_tokens} and its "
            f"targets need {sequence_tokens + 1}; give more data, a shorter sequence, or another data.held_out"
        )
    return (len(tokens) - 1) // sequence_tokens


def read_windows(tokens: Tokens, indices: NDArray[np.int64], sequence_tokens: int) -> Batch:
    """Return (inputs, targets) of the windows `indices` [n], both int64 CPU tensors [n, sequence_tokens]."""
    block = np.empty((len(indices), sequence_tokens + 1), np.int64)
    for row, start in zip(block, (indices * sequence_tokens).tolist(), strict=True):
        row[:] = tokens[start : start + sequence_tokens + 1]
    rows = torch.from_numpy(block)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _as_run(tokens: Tokens | Array) -> Tokens:
    return tokens if isinstance(tokens, Tokens) else Tokens((tokens,))


def _check_slice(microbatch_sequences: int, rank: int, ranks: int) -> None:
    if microbatch_sequences < 1:
        raise ValueError(f"microbatch_sequences={microbatch_sequences}: must be a whole number ≥ 1")
    if not 0 <= rank < ranks:
        raise ValueError(f"rank={rank} of ranks={ranks}: a rank is 0 to ranks - 1")


def shuffled(positions: NDArray[np.int64], *, windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the windows at int64 `positions` [n] of an epoch; the map is one to one on [0, windows)."""
    half_bits = max(LEAST_HALF_BITS, ((windows - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    values = _feistel(positions.astype(np.uint64), keys, half_bits)
    while (outside := values >= windows).any():
        values[outside] = _feistel(values[outside], keys, half_bits)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half_bits: int) -> NDArray[np.uint64]:
    half, mask = np.uint64(half_bits), np.uint64(2**half_bits - 1)
    left, right = values >> half, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right + key) >> np.uint64(64 - half_bits))
    return (left << half) | right


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every input bit over all 64 bits, modulo 2^64 (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
