"""Order of an epoch: a permutation that is computed on demand and never stored.

A Feistel network maps 2b-bit numbers one to one for any round function: (left, right) becomes (right, left ^ f(right)),
which is invertible. The network permutes [0, 4^b) for the smallest 4^b >= windows. A value that lands outside
[0, windows) passes through the network again until it lands inside ("cycle walking"). The map stays one to one, and
takes fewer than four passes on average.

So any position of any epoch costs about a microsecond and no memory, and a resumed run replays nothing. The order
depends only on (windows, seed, epoch). The keys come from numpy's SeedSequence, whose values numpy guarantees for all
versions, unlike those of `Generator.permutation`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
LEAST_HALF_BITS = 3


def shuffled(positions: NDArray[np.int64], *, windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the windows at int64 `positions` [n] of an epoch; the map is one to one on [0, windows)."""
    half_bits = max(LEAST_HALF_BITS, ((windows - 1).bit_length() + 1) // 2)
    keys = np.random.SeedSequence(seed, spawn_key=(epoch,)).generate_state(ROUNDS, np.uint64).astype(np.uint64)
    values = _feistel(positions.astype(np.uint64), keys, half_bits)
    while (outside := values >= windows).any():
        values[outside] = _feistel(values[outside], keys, half_bits)
    return values.astype(np.int64)


def in_epochs(samples: NDArray[np.int64], *, windows: int, seed: int, shuffle: bool) -> NDArray[np.int64]:
    """Return the window of each of the numbered `samples` [n]: position s mod windows of epoch s div windows.

    Without `shuffle`, every epoch is in the order of the windows.
    """
    epochs, positions = np.divmod(samples, windows)
    for epoch in np.unique(epochs).tolist() if shuffle else ():
        here = epochs == epoch
        positions[here] = shuffled(positions[here], windows=windows, seed=seed, epoch=epoch)
    return positions


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
