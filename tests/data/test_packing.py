"""Samples of their own length become sequences in which every token that counts is a target once."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from dzero.data.batch import IGNORED
from dzero.data.packing import SampleSequences, best_fit


class Drawn:
    """Samples of 2 to 12 tokens; id 100 i + j is token j of sample i, so that a target tells where it is from."""

    def __init__(self, samples: int = 40) -> None:
        drawn = np.random.default_rng(0)
        self.lengths = drawn.integers(2, 13, samples)
        self._counts = [drawn.random(length) < 0.5 for length in self.lengths]
        self.counted = np.array([counts[1:].sum() for counts in self._counts])

        self.hashes = np.arange(samples, dtype=np.uint64)

    def ids(self, index: int) -> NDArray[np.int32]:
        return np.arange(self.lengths[index], dtype=np.int32) + 100 * index

    def counts(self, index: int) -> NDArray[np.bool_]:
        return self._counts[index]

    def targets(self) -> list[int]:
        """Ids that must be targets."""
        return [
            int(token)
            for index in range(len(self.lengths))
            for token, counts in list(zip(self.ids(index), self.counts(index), strict=True))[1:]
            if counts
        ]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("length", [11, 12, 30])
def test_every_token_that_counts_is_a_target_once_after_its_own_predecessor(pack: bool, length: int) -> None:
    samples = Drawn()
    made = SampleSequences(samples, np.arange(40), length, pack=pack, multiple=4, name="drawn")
    batches = [made.read(np.array([index])) for index in range(len(made))]
    found = [
        (int(target), int(token))
        for batch in batches
        for token, target in zip(batch.tokens[0], batch.targets[0], strict=True)
        if target != IGNORED
    ]
    assert sorted(target for target, _ in found) == samples.targets()
    assert all(target == token + 1 for target, token in found)
    assert [made.counted(np.array([i])) for i in range(len(made))] == [
        int((batch.targets != IGNORED).sum()) for batch in batches
    ]
    assert made.counted(np.arange(len(made))) == len(found)


def test_positions_restart_in_each_sample_and_in_the_rest() -> None:
    samples = Drawn()
    made = SampleSequences(samples, np.arange(40), 30, pack=True, multiple=0, name="drawn")
    batch = made.read(np.arange(len(made)))
    assert batch.positions is not None
    assert batch.tokens.shape == batch.positions.shape == (len(made), 30)
    for tokens, positions in zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True):
        for place, (token, position) in enumerate(zip(tokens, positions, strict=True)):
            assert position == token % 100 or token == 0
            assert position == 0 or positions[place - 1] == position - 1
            assert (position == 0) == (place == 0 or tokens[place - 1] // 100 != token // 100 or position == 0)


def test_padded_sequences_are_as_long_as_their_longest_sample_up_to_a_multiple() -> None:
    samples = Drawn()
    made = SampleSequences(samples, np.arange(40), 30, pack=False, multiple=4, name="drawn")
    batch = made.read(np.array([0, 1, 2]))
    assert batch.positions is None
    assert batch.tokens.shape[1] % 4 == 0
    assert 0 <= batch.tokens.shape[1] - (batch.tokens % 100).amax().item() - 1 < 4
    whole = SampleSequences(samples, np.arange(40), 30, pack=False, multiple=0, name="drawn")
    assert whole.read(np.array([0])).tokens.shape[1] == 30


def test_other_contents_or_another_mask_of_any_sample_are_other_sequences() -> None:
    def identity(samples: Drawn) -> dict[str, int]:
        return SampleSequences(samples, np.arange(4000), 30, pack=True, multiple=0, name="drawn").identity()

    for change in ("hashes", "counted"):
        samples = Drawn(4000)
        before = identity(samples)
        getattr(samples, change)[3777] += 1
        assert identity(samples) != before


def test_groups_fit_and_are_few() -> None:
    sizes = np.random.default_rng(1).integers(1, 65, 5000)
    groups = best_fit(sizes, 64)
    assert sorted(index for group in groups for index in group) == list(range(5000))
    assert max(sizes[group].sum() for group in groups) <= 64
    assert len(groups) <= 1.01 * sizes.sum() / 64
    assert groups == best_fit(sizes, 64)


def test_no_sample_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="drawn: there is no sample"):
        SampleSequences(Drawn(), np.arange(0), 12, pack=True, multiple=0, name="drawn")
