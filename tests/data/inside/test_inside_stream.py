"""Promises of streams of sequences: each once an epoch of its source in exact shares, over any ranks and resumes.

They look inside, because of small sources and of sizes that no files have: tokens are numbers that tell where they are
from, and a stream is asked without a run.
"""

from __future__ import annotations

import itertools
import json
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from corpora import IGNORED

from dzero.data.mixed_sequences import MixedSequences, shares_of, split, stream_over
from dzero.data.order import shuffled
from dzero.data.sequences import TextSequences
from dzero.data.stream import SequenceStream, evaluation_batches
from dzero.data.tokens import Tokens

T = 4
SIZES = {"a": 23, "b": 7, "c": 40}
WEIGHTS = [0.5, 0.2, 0.3]
WINDOWS = SIZES["a"]
TOKENS = np.arange(WINDOWS * T + 3, dtype=np.int32)
ONE = TextSequences(TOKENS, T)


def mixed(weights: list[float] | None = WEIGHTS, sizes: dict[str, int] = SIZES) -> MixedSequences:
    """Token i of source j is 1000 j + i, so that the first token of a sequence tells its source and number."""
    numbered = {name: 1000 * [*SIZES].index(name) + np.arange(size * T + 1) for name, size in sizes.items()}
    return MixedSequences({name: TextSequences(tokens, T) for name, tokens in numbered.items()}, weights)


SEQUENCES = {"one": ONE, "several": mixed()}
"""Those of the source a alone, and of all three."""


def stream(rank: int = 0, ranks: int = 1, of: Any = ONE, **options: Any) -> SequenceStream:
    given = {"microbatch_sequences": 2, "seed": 5, **options}
    return stream_over(SEQUENCES[of] if isinstance(of, str) else of, rank=rank, ranks=ranks, **given)


def step(streams: list[SequenceStream]) -> list[tuple[str, int]]:
    """Source and number of the windows that a step of all ranks takes, in rank order."""
    firsts = [int(row[0]) for each in streams for row in each.next().tokens]
    return [([*SIZES][first // 1000], first % 1000 // T) for first in firsts]


def in_order(count: int, **options: Any) -> list[tuple[str, int]]:
    """What one rank takes, a window at a time."""
    alone = stream(microbatch_sequences=1, **options)
    return [each for _ in range(count) for each in step([alone])]


def test_inputs_and_targets_are_the_window_and_its_shift() -> None:
    inputs, targets, _ = stream(shuffle=False).next()
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


def test_the_order_of_an_epoch_is_a_permutation() -> None:
    for windows, seed, epoch in itertools.product((1, 2, 3, 7, 64, 65, 1000, 4096, 4097), (0, 2**70), (0, 1)):
        order = shuffled(np.arange(windows), windows=windows, seed=seed, epoch=epoch)
        assert np.array_equal(np.sort(order), np.arange(windows))


def test_the_order_of_a_huge_epoch_costs_no_memory_and_repeats_nothing() -> None:
    windows = 10**12 + 39
    order = shuffled(np.arange(windows - 5000, windows), windows=windows, seed=1, epoch=0)
    assert len(set(order.tolist())) == 5000
    assert 0 <= order.min() <= order.max() < windows


def test_the_order_looks_random() -> None:
    """Chi-squared of (position, window) in a 16 x 16 grid, 225 degrees of freedom: mean 225, deviation 21."""
    windows, orders = 1009, 40
    grid = np.zeros((16, 16))
    positions = np.arange(windows)
    for epoch in range(orders):
        order = shuffled(positions, windows=windows, seed=3, epoch=epoch)
        np.add.at(grid, (positions * 16 // windows, order * 16 // windows), 1)
    expected = windows * orders / 256
    assert 140 < ((grid - expected) ** 2 / expected).sum() < 330
    neighbours = np.diff(shuffled(positions, windows=windows, seed=3, epoch=0))
    assert np.abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1] + 0.5) < 0.1  # -1/2 for independent draws


def test_the_order_never_changes_between_versions() -> None:
    """Frozen values: a resume after an upgrade must find the order it left."""
    assert shuffled(np.arange(10), windows=10, seed=7, epoch=3).tolist() == [7, 1, 8, 0, 5, 4, 9, 2, 3, 6]


@pytest.mark.parametrize("of", SEQUENCES)
@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_does_not_depend_on_ranks_or_steps(of: str, shuffle: bool) -> None:
    """Also where a step is larger than a source."""
    order = in_order(240, of=of, shuffle=shuffle)
    for ranks, microbatch in ((1, 2), (2, 5), (3, 2), (4, 10), (3, 40)):
        options = {"of": of, "shuffle": shuffle, "microbatch_sequences": microbatch}
        streams = [stream(rank, ranks, **options) for rank in range(ranks)]
        seen = [each for _ in range(240 // (ranks * microbatch)) for each in step(streams)]
        assert seen == order[: len(seen)]


@pytest.mark.parametrize("of", SEQUENCES)
def test_every_window_once_in_each_epoch_of_its_source_in_a_new_order(of: str) -> None:
    seen = in_order(600, of=of)
    taken = dict(zip(SIZES, (300, 120, 180), strict=True)) if of == "several" else {"a": 600}
    for name, count in taken.items():
        numbers, size = [number for each, number in seen if each == name], SIZES[name]
        assert len(numbers) == count
        epochs = [numbers[at : at + size] for at in range(0, count - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1]
    assert seen != in_order(600, of=of, seed=6)


@pytest.mark.parametrize("of", SEQUENCES)
@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (2, 3)])
def test_a_resume_continues_at_the_window_on_any_ranks(of: str, before: int, after: int) -> None:
    wanted = in_order(2 * before * 7 + 60, of=of)
    streams = [stream(rank, before, of) for rank in range(before)]
    seen = [each for _ in range(7) for each in step(streams)]
    state = json.loads(json.dumps(streams[0].state_dict()))
    assert all(each.state_dict() == state for each in streams)
    resumed = [stream(rank, after, of) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(state)
    while len(seen) < len(wanted):
        seen += step(resumed)
    assert seen[: len(wanted)] == wanted


def test_a_state_of_other_data_or_settings_is_refused_and_changes_nothing() -> None:
    state = stream().state_dict() | {"position": 9}
    changed = TOKENS.copy()
    changed[50] += 1
    others = {
        "the samples or": stream(of=TextSequences(changed, T)),
        "windows was": stream(of=TextSequences(TOKENS[:-8], T)),
        "sequence_tokens was": stream(of=TextSequences(TOKENS, 5)),
        "seed was": stream(seed=6),
        "shuffle was": stream(shuffle=False),
        "another number of sources": stream(of="several"),
    }
    for says, other in others.items():
        with pytest.raises(ValueError, match=says):
            other.load_state_dict(state)
        assert other.samples == 0
    for wrong, says in (
        ({"epoch": 0}, "lacks"),
        (state | {"position": WINDOWS}, "positions are 0 to 22"),
        (state | {"epoch": 2**62}, "cannot stand at epoch 4611686018427387904: no run reads"),
        (stream(of="several").state_dict(), "saved over other data"),
    ):
        with pytest.raises(ValueError, match=says):
            stream().load_state_dict(wrong)


def test_too_few_tokens_and_impossible_slices_are_errors_that_name_the_tokens() -> None:
    with pytest.raises(ValueError, match=r"poem\.txt: too short, 4 tokens"):
        stream(of=TextSequences(Tokens((TOKENS[:T],), "poem.txt"), T))
    with pytest.raises(ValueError, match="rank=2 of ranks=2"):
        stream(2, 2)
    with pytest.raises(ValueError, match="microbatch_sequences=0"):
        stream(microbatch_sequences=0)
    with pytest.raises(ValueError, match="1-D integers"):
        stream(of=TextSequences(TOKENS.astype(float), T))


def evaluated(rank: int, ranks: int, microbatch: int = 2, **most: int) -> list[Any]:
    return [*evaluation_batches(ONE, microbatch_sequences=microbatch, rank=rank, ranks=ranks, **most)]


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_evaluation_takes_equal_steps_and_no_window_twice(ranks: int) -> None:
    batches = [evaluated(rank, ranks) for rank in range(ranks)]
    steps = WINDOWS // (2 * ranks)
    assert [len(each) for each in batches] == [steps] * ranks
    seen = [int(row[0]) // T for at in range(steps) for rank in range(ranks) for row in batches[rank][at].tokens]
    assert seen == sorted(set(seen))
    assert len(seen) == steps * 2 * ranks
    few = [int(row[0]) // T for batch in evaluated(0, 1, max_batches=2) for row in batch.tokens]
    assert few == [0, 5, 11, 17], "spread over the whole run"


def test_evaluation_without_one_full_step_takes_every_sequence_and_counts_nothing_else() -> None:
    batches = [batch for rank in range(2) for batch in evaluated(rank, 2, 12)]
    rows = [row for batch in batches for row in zip(batch.tokens, batch.targets, strict=True)]
    assert len(rows) == 24
    assert [int(tokens[0]) // T for tokens, _ in rows[:WINDOWS]] == [*range(WINDOWS)]
    assert rows[WINDOWS][1].tolist() == [IGNORED] * T
    with pytest.raises(ValueError, match="max_batches=0"):
        evaluated(0, 1, max_batches=0)


# Of several sources


@pytest.mark.parametrize(
    "weights", [[0.5, 0.2, 0.3], [1.0, 1.0, 1.0], [1e-9, 1.0, 3.0], [0.0, 2.0, 1.0], [1.0, 0.0, 0.0], [1.0] * 12]
)
def test_every_stretch_of_samples_has_the_exact_shares(weights: list[float]) -> None:
    shares = shares_of(weights)
    before = split(np.arange(5001), shares)
    assert np.array_equal(before.sum(0), np.arange(5001))
    assert set(np.unique(np.diff(before, axis=1))) <= {0, 1}
    for counts, share in zip(before, shares, strict=True):
        exact = np.arange(5001) * (share / sum(shares))
        assert np.abs(counts - exact).max() <= 2.0
        assert share or not counts.any()
    far = 10**15
    assert split(np.array([far]), shares).sum() == far
    assert abs(int(split(np.array([far]), shares)[0, 0]) - Fraction(shares[0], sum(shares)) * far) <= 2


def test_weights_are_taken_as_written_and_by_their_proportions() -> None:
    assert shares_of([0.7, 0.3]) == shares_of([70, 30]) == [7, 3]
    assert shares_of([0.1, 0.2, 0.7]) == [1, 2, 7]
    assert shares_of([23, 7, 40]) == mixed(None).shares


def test_a_state_of_other_weights_or_sources_is_refused() -> None:
    state = stream(of="several").state_dict()
    for other, message in (
        (mixed([0.5, 0.3, 0.2]), "data.weights changed"),
        (mixed([1.0, 1.0], {"a": 23, "b": 7}), "sources was 3 and is 2"),
        (mixed(sizes={**SIZES, "b": 8}), "windows was"),
    ):
        with pytest.raises(ValueError, match=message):
            stream(of=other).load_state_dict(state)


def test_what_is_taken_of_each_source_is_counted_before_a_step() -> None:
    ranks = [stream(rank, 2, "several", microbatch_sequences=5) for rank in range(2)]
    total = dict.fromkeys(SIZES, 0)
    for _ in range(6):
        use, taken = ranks[0].use(2), []
        assert use == ranks[1].use(2)
        for _ in range(2):
            found = step(ranks)
            shares = [sum(each == name for each, _ in found) for name in SIZES]
            assert all(abs(share - weight * 10) <= 2 for share, weight in zip(shares, WEIGHTS, strict=True))
            taken += found
        for name, size in SIZES.items():
            total[name] += sum(each == name for each, _ in taken)
            assert use[name].tokens == T * sum(each == name for each, _ in taken)
            assert use[name].epochs == total[name] / size
