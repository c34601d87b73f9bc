"""Promises of the token stream: every window once an epoch, over any ranks, across any resume."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from dzero.data.batch import IGNORED
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
        TextSequences(TOKENS, T),
        microbatch_sequences=microbatch,
        rank=rank,
        ranks=ranks,
        seed=seed,
        shuffle=shuffle,
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
def test_every_window_exactly_once_per_epoch_over_any_ranks(ranks, shuffle):
    streams = [stream(rank, ranks, shuffle=shuffle) for rank in range(ranks)]
    steps = -(-3 * WINDOWS // (2 * ranks))
    seen = [window for _ in range(steps) for window in step(streams)]
    for epoch in range(3):
        assert sorted(seen[epoch * WINDOWS : (epoch + 1) * WINDOWS]) == list(range(WINDOWS))


def test_the_order_of_samples_does_not_depend_on_ranks_or_microbatch():
    one = stream(microbatch=1)
    alone = [window for _ in range(24) for window in step([one])]
    many = [stream(rank, 4, microbatch=3) for rank in range(4)]
    assert [window for _ in range(2) for window in step(many)] == alone


def test_a_step_larger_than_the_corpus_runs_over_several_epochs():
    seen = Counter(step([stream(rank, 2, microbatch=2 * WINDOWS) for rank in range(2)]))
    assert seen == Counter(dict.fromkeys(range(WINDOWS), 4))


def test_epochs_and_seeds_differ_and_the_same_seed_repeats():
    def epoch(number: int, seed: int) -> list[int]:
        each = stream(microbatch=1, seed=seed)
        each.samples = number * WINDOWS
        return [window for _ in range(WINDOWS) for window in step([each])]

    assert epoch(0, 5) == epoch(0, 5)
    assert epoch(0, 5) != epoch(1, 5)
    assert epoch(0, 5) != epoch(0, 6)


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations((1, 2, 3, 4), 2)))
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


def test_resume_continues_exactly():
    first, second = stream(), stream()
    for _ in range(17):
        first.next()
    second.load_state_dict(first.state_dict())
    for _ in range(30):
        assert all(map(torch.equal, first.next()[:2], second.next()[:2]))


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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_evaluation_takes_equal_steps_and_no_window_twice(ranks):
    batches = [
        list(evaluation_batches(TextSequences(TOKENS, T), microbatch_sequences=2, rank=rank, ranks=ranks))
        for rank in range(ranks)
    ]
    steps = WINDOWS // (2 * ranks)
    assert [len(each) for each in batches] == [steps] * ranks
    seen = [int(row[0]) // T for at in range(steps) for rank in range(ranks) for row in batches[rank][at][0]]
    assert seen == sorted(set(seen))
    assert len(seen) == steps * 2 * ranks


def test_evaluation_with_few_batches_is_spread_over_the_whole_run():
    batches = evaluation_batches(TextSequences(TOKENS, T), microbatch_sequences=2, rank=0, ranks=1, max_batches=2)
    assert [int(row[0]) // T for batch in batches for row in batch.tokens] == [0, 5, 11, 17]


def test_evaluation_without_one_full_step_takes_every_sequence_and_counts_nothing_else():
    ranks = [evaluation_batches(TextSequences(TOKENS, T), microbatch_sequences=12, rank=r, ranks=2) for r in range(2)]
    rows = [row for (batch,) in ranks for row in zip(batch.tokens, batch.targets, strict=True)]
    assert len(rows) == 24
    assert [int(tokens[0]) // T for tokens, _ in rows[:WINDOWS]] == [*range(WINDOWS)]
    assert rows[WINDOWS][1].tolist() == [IGNORED] * T
    with pytest.raises(ValueError, match="max_batches=0"):
        evaluation_batches(TextSequences(TOKENS, T), microbatch_sequences=1, rank=0, ranks=1, max_batches=0)


def test_a_run_over_parts_reads_and_splits_like_one_array():
    whole = np.arange(20)
    run = Tokens((whole[:7], whole[7:7], whole[7:8], whole[8:].astype(np.uint16)))
    assert len(run) == 20
    for start, stop in itertools.combinations_with_replacement(range(21), 2):
        assert run[start:stop].tolist() == whole[start:stop].tolist()
    for at in range(21):
        head, tail = run.split(at, ("head", "tail"))
        assert (head[:].tolist(), tail[:].tolist()) == (whole[:at].tolist(), whole[at:].tolist())
        assert (head.name, tail.name) == ("head", "tail")
