"""The order of an epoch: a permutation of its windows that is computed, never stored.

A Feistel network maps 2b-bit numbers one to one, whatever its round function is: (left, right) becomes
(right, left ^ f(right)), which can be undone. Over the smallest 4^b >= windows it permutes a little too much;
a value that lands outside is sent through again until it lands inside ("cycle walking"), which stays one to
one and takes fewer than four passes on average. So any position of any epoch costs a microsecond and no
memory, a resume needs no replay, and the order depends only on (windows, seed, epoch): its keys come from
numpy's SeedSequence, whose values are promised to stay the same in every numpy version, unlike those of
`Generator.permutation`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
LEAST_HALF_BITS = 3


def shuffled(positions: NDArray[np.int64], *, windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The window at each position [n] of the epoch's order; one to one on [0, windows)."""
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
    """Spread every input bit over all 64 (the finaliser of SplitMix64); arithmetic mod 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
