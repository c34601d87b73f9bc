"""Microbatches that are copied ahead are those of the stream, which stands where they are taken."""

from __future__ import annotations

import numpy as np
import torch
from simulation import Simulation

from dzero.data.prefetch import BatchPrefetcher
from dzero.data.sequences import TextSequences
from dzero.data.stream import SequenceStream

CPU = torch.device("cpu")


def stream() -> SequenceStream:
    return SequenceStream(TextSequences(np.arange(200), 7), microbatch_sequences=2, rank=1, ranks=2, seed=3)


def test_they_are_the_streams_also_where_it_is_set_back() -> None:
    plain, read = stream(), stream()
    with Simulation().running() as simulation:
        ahead = BatchPrefetcher(read, CPU)
        assert read.samples == 0
        for step in range(8):
            if step == 5:
                for each in (plain, read):
                    each.load_state_dict({**each.state_dict(), "epoch": 0, "position": 4})
            assert all(map(torch.equal, ahead.next()[:2], plain.next()[:2]))
            assert read.state_dict() == plain.state_dict()
    assert [str(race) for race in simulation.races.values()] == []


def test_without_streams_nothing_is_read_ahead() -> None:
    plain, read = stream(), stream()
    ahead = BatchPrefetcher(read, CPU)
    assert all(torch.equal(a, b) for a, b in zip(ahead.next()[:2], plain.next()[:2], strict=True))
    assert ahead._coming is None
