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
WINDOWS = 23
# Token i is the number i, so that the first input of a window tells which window it is.
TOKENS = np.arange(WINDOWS * T + 3, dtype=np.int32)


def stream(
    rank: int = 0, ranks: int = 1, *, microbatch: int = 2, shuffle: bool = True, seed: int = 5
) -> SequenceStream:
    return SequenceStream(
        TextSequences(TOKENS, T), microbatch_sequences=microbatch, rank=rank, ranks=ranks, seed=seed, shuffle=shuffle
    )


def step(streams: list[SequenceStream]) -> list[int]:
    """The windows one step of all ranks takes, in rank order."""
    return [int(row[0]) // T for each in streams for row in each.next()[0]]


def test_inputs_and_targets_are_the_window_and_its_shift():
    inputs, targets, _ = stream(shuffle=False).next()
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert targets.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert inputs.is_contiguous()
    assert targets.is_contiguous()


@pytest.mark.parametrize("windows", [1, 2, 3, 7, 64, 65, 1000, 4096, 4097])
def test_the_order_of_an_epoch_is_a_permutation(windows):
    for seed, epoch in itertools.product((0, 2**70), (0, 1)):
        order = shuffled(np.arange(windows), windows=windows, seed=seed, epoch=epoch)
        assert np.array_equal(np.sort(order), np.arange(windows))


def test_the_order_of_a_huge_epoch_costs_no_memory_and_repeats_nothing():
    windows = 10**12 + 39
    order = shuffled(np.arange(windows - 5000, windows), windows=windows, seed=1, epoch=0)
    assert len(set(order.tolist())) == 5000
    assert 0 <= order.min() <= order.max() < windows


def test_the_order_looks_random():
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


def test_the_order_never_changes_between_versions():
    """Frozen values: a resume after an upgrade must find the order it left."""
    assert shuffled(np.arange(10), windows=10, seed=7, epoch=3).tolist() == [7, 1, 8, 0, 5, 4, 9, 2, 3, 6]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_window_exactly_once_per_epoch_in_one_order_for_any_ranks(ranks, shuffle):
    """Also where a step is larger than the corpus."""
    alone = stream(microbatch=1, shuffle=shuffle)
    order = [window for _ in range(4 * WINDOWS) for window in step([alone])]
    for microbatch in (2, 40):
        streams = [stream(rank, ranks, microbatch=microbatch, shuffle=shuffle) for rank in range(ranks)]
        seen = [window for _ in range(-(-3 * WINDOWS // (microbatch * ranks))) for window in step(streams)]
        assert seen[: 3 * WINDOWS] == order[: 3 * WINDOWS]
        for epoch in range(3):
            assert sorted(seen[epoch * WINDOWS : (epoch + 1) * WINDOWS]) == list(range(WINDOWS))


def test_epochs_and_seeds_differ_and_the_same_seed_repeats():
    def epoch(number: int, seed: int) -> list[int]:
        each = stream(microbatch=1, seed=seed)
        each.samples = number * WINDOWS
        return [window for _ in range(WINDOWS) for window in step([each])]

    assert epoch(0, 5) == epoch(0, 5)
    assert epoch(0, 5) != epoch(1, 5)
    assert epoch(0, 5) != epoch(0, 6)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 1), (2, 3), (3, 4)])
def test_resume_on_other_ranks_sees_every_sample_once(before, after):
    streams = [stream(rank, before) for rank in range(before)]
    seen = [window for _ in range(3) for window in step(streams)]
    states = [each.state_dict() for each in streams]
    assert all(state == states[0] for state in states)
    assert all(type(value) is int for value in states[0].values())
    resumed = [stream(rank, after, microbatch=3) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(states[0])
    while len(seen) < 2 * WINDOWS:
        seen += step(resumed)
    assert sorted(seen[:WINDOWS]) == sorted(seen[WINDOWS : 2 * WINDOWS]) == list(range(WINDOWS))


def test_a_state_of_other_data_or_settings_is_refused_and_changes_nothing():
    state = stream().state_dict() | {"position": 9}
    changed = TOKENS.copy()
    changed[50] += 1
    others = {
        "crc32": SequenceStream(TextSequences(changed, T), microbatch_sequences=2, rank=0, ranks=1, seed=5),
        "windows": SequenceStream(TextSequences(TOKENS[:-8], T), microbatch_sequences=2, rank=0, ranks=1, seed=5),
        "sequence_tokens": SequenceStream(TextSequences(TOKENS, 5), microbatch_sequences=2, rank=0, ranks=1, seed=5),
        "seed": stream(seed=6),
        "shuffle": stream(shuffle=False),
    }
    for key, other in others.items():
        with pytest.raises(ValueError, match="the samples or" if key == "crc32" else f"{key} was"):
            other.load_state_dict(state)
        assert other.samples == 0
    with pytest.raises(ValueError, match="lacks"):
        stream().load_state_dict({"epoch": 0})
    with pytest.raises(ValueError, match="positions are 0 to 22"):
        stream().load_state_dict(state | {"position": WINDOWS})


def test_too_few_tokens_and_impossible_slices_are_errors_that_name_the_tokens():
    short = Tokens((TOKENS[:T],), "poem.txt")
    with pytest.raises(ValueError, match=r"poem\.txt: too short, 4 tokens"):
        SequenceStream(TextSequences(short, T), microbatch_sequences=1, rank=0, ranks=1, seed=0)
    with pytest.raises(ValueError, match="rank=2 of ranks=2"):
        stream(2, 2)
    with pytest.raises(ValueError, match="microbatch_sequences=0"):
        stream(microbatch=0)
    with pytest.raises(ValueError, match="1-D integers"):
        SequenceStream(TextSequences(TOKENS.astype(float), T), microbatch_sequences=1, rank=0, ranks=1, seed=0)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_evaluation_takes_equal_steps_and_no_window_twice(ranks):
    def evaluated(rank: int, of: int, **most: int) -> list[Any]:
        return [*evaluation_batches(TextSequences(TOKENS, T), microbatch_sequences=2, rank=rank, ranks=of, **most)]

    batches = [evaluated(rank, ranks) for rank in range(ranks)]
    steps = WINDOWS // (2 * ranks)
    assert [len(each) for each in batches] == [steps] * ranks
    seen = [int(row[0]) // T for at in range(steps) for rank in range(ranks) for row in batches[rank][at][0]]
    assert seen == sorted(set(seen))
    assert len(seen) == steps * 2 * ranks
    few = [int(row[0]) // T for batch in evaluated(0, 1, max_batches=2) for row in batch.tokens]
    assert few == [0, 5, 11, 17], "spread over the whole run"


def test_evaluation_without_one_full_step_takes_every_sequence_and_counts_nothing_else():
    ranks = [evaluation_batches(TextSequences(TOKENS, T), microbatch_sequences=12, rank=r, ranks=2) for r in range(2)]
    rows = [row for (batch,) in ranks for row in zip(batch.tokens, batch.targets, strict=True)]
    assert len(rows) == 24
    assert [int(tokens[0]) // T for tokens, _ in rows[:WINDOWS]] == [*range(WINDOWS)]
    assert rows[WINDOWS][1].tolist() == [IGNORED] * T
    with pytest.raises(ValueError, match="max_batches=0"):
        evaluation_batches(TextSequences(TOKENS, T), microbatch_sequences=1, rank=0, ranks=1, max_batches=0)


# Of several sources

SIZES = {"a": 23, "b": 7, "c": 40}


WEIGHTS = [0.5, 0.2, 0.3]


ORIGIN = {name: 1000 * number for number, name in enumerate(SIZES)}


def mixed(weights: list[float] | None = None, sizes: dict[str, int] = SIZES) -> MixedSequences:
    """Token i of source j is 1000 j + i, so that the first token of a sequence tells its source and number."""
    sources = {
        name: TextSequences(ORIGIN[name] + np.arange(size * T + 1, dtype=np.int32), T) for name, size in sizes.items()
    }
    return MixedSequences(sources, weights)


def mixed_stream(
    rank: int = 0, ranks: int = 1, *, microbatch: int = 2, seed: int = 5, **changes: Any
) -> SequenceStream:
    sequences = mixed(**{"weights": WEIGHTS, **changes})
    return stream_over(sequences, microbatch_sequences=microbatch, rank=rank, ranks=ranks, seed=seed)


def mixed_step(streams: list[SequenceStream]) -> list[tuple[str, int]]:
    """Source and number of the sequences that a step of all ranks takes, in rank order."""
    firsts = [int(row[0]) for each in streams for row in each.next().tokens]
    return [([*SIZES][first // 1000], first % 1000 // T) for first in firsts]


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
    assert shares_of([23, 7, 40]) == mixed().shares


def test_every_sequence_of_a_source_once_in_each_of_its_epochs_in_a_new_order() -> None:
    one = mixed_stream(microbatch=10)
    seen = [each for _ in range(60) for each in mixed_step([one])]
    assert {name: sum(each == name for each, _ in seen) for name in SIZES} == {"a": 300, "b": 120, "c": 180}
    for name, size in SIZES.items():
        numbers = [number for each, number in seen if each == name]
        epochs = [numbers[at : at + size] for at in range(0, len(numbers) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_every_step_has_the_proportions_and_the_order_does_not_depend_on_ranks() -> None:
    alone = mixed_stream(microbatch=1)
    wanted = [each for _ in range(240) for each in mixed_step([alone])]
    for ranks, microbatch in ((2, 5), (4, 10), (3, 10)):
        streams = [mixed_stream(rank, ranks, microbatch=microbatch) for rank in range(ranks)]
        steps = [mixed_step(streams) for _ in range(240 // (ranks * microbatch))]
        assert [each for found in steps for each in found] == wanted[: len(steps) * ranks * microbatch]
        for found in steps:
            for name, weight in zip(SIZES, WEIGHTS, strict=True):
                assert abs(sum(each == name for each, _ in found) - weight * len(found)) <= 2
    assert wanted != [each for _ in range(240) for each in mixed_step([mixed_stream(microbatch=1, seed=6)])]


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 4), (4, 2), (3, 1)])
def test_a_resume_continues_at_the_sample_on_any_ranks(before: int, after: int) -> None:
    alone = mixed_stream(microbatch=1)
    wanted = [each for _ in range(2 * before * 7 + 60) for each in mixed_step([alone])]
    streams = [mixed_stream(rank, before) for rank in range(before)]
    seen = [each for _ in range(7) for each in mixed_step(streams)]
    state = json.loads(json.dumps(streams[0].state_dict()))
    resumed = [mixed_stream(rank, after) for rank in range(after)]
    for each in resumed:
        each.load_state_dict(state)
    while len(seen) < len(wanted):
        seen += mixed_step(resumed)
    assert seen[: len(wanted)] == wanted


def test_a_state_of_other_weights_or_sources_is_refused() -> None:
    state = mixed_stream().state_dict()
    for changes, message in (
        ({"weights": [0.5, 0.3, 0.2]}, "data.weights changed"),
        ({"sizes": {"a": 23, "b": 7}, "weights": [1.0, 1.0]}, "sources was 3 and is 2"),
        ({"sizes": {**SIZES, "b": 8}}, "windows was"),
    ):
        with pytest.raises(ValueError, match=message):
            mixed_stream(**changes).load_state_dict(state)
    single = stream_over(TextSequences(np.arange(99), T), microbatch_sequences=1, rank=0, ranks=1, seed=5)
    assert type(single) is SequenceStream
    with pytest.raises(ValueError, match="saved over other data"):
        single.load_state_dict(state)
    with pytest.raises(ValueError, match=r"lacks .*'sources'.*another number of sources"):
        mixed_stream().load_state_dict(single.state_dict())


def test_what_is_taken_of_each_source_is_counted_before_a_step() -> None:
    ranks = [mixed_stream(rank, 2, microbatch=5) for rank in range(2)]
    total = dict.fromkeys(SIZES, 0)
    for _ in range(6):
        assert ranks[0].use(2) == ranks[1].use(2)
        use, taken = ranks[0].use(2), [*mixed_step(ranks), *mixed_step(ranks)]
        for name, size in SIZES.items():
            total[name] += sum(each == name for each, _ in taken)
            assert use[name].tokens == T * sum(each == name for each, _ in taken)
            assert use[name].epochs == total[name] / size
