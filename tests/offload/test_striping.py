"""Where each byte lies: every byte once, nothing overlaps, and each path has its share, at every moment, by formula."""

from __future__ import annotations

import random

import pytest

from dzero.offload.memory_pool import aligned
from dzero.offload.striping import Striping, stripe

PAGE = 4096


def paths_of(striping: Striping, name: str) -> list[int]:
    return [block.path for block in striping.pieces[name]]


def test_equal_weights_take_turns_across_pieces() -> None:
    striping = stripe({"a": 5 * PAGE, "b": 2 * PAGE}, PAGE, [1.0, 1.0, 1.0])
    assert paths_of(striping, "a") + paths_of(striping, "b") == [0, 1, 2, 0, 1, 2, 0]
    assert striping.file_bytes == (3 * PAGE, 2 * PAGE, 2 * PAGE)


@pytest.mark.parametrize("weights", [(3, 1), (1, 3), (2, 1, 1), (5, 2), (7, 4, 1)])
def test_whole_weights_are_met_exactly_every_time_they_sum_up(weights: tuple[int, ...]) -> None:
    period = sum(weights)
    paths = paths_of(stripe({"a": 4 * period * PAGE}, PAGE, weights), "a")
    for start in range(0, len(paths), period):
        counts = [paths[start : start + period].count(path) for path in range(len(weights))]
        assert counts == list(weights)


def test_many_small_pieces_fill_all_paths() -> None:
    striping = stripe({f"p{index}": 1 for index in range(40)}, 16 << 20, [3.0, 1.0])
    assert striping.file_bytes == (30 * PAGE, 10 * PAGE)


@pytest.mark.parametrize("seed", range(30))
def test_every_byte_has_one_place_and_no_path_is_a_block_ahead_of_its_share(seed: int) -> None:
    draw = random.Random(seed)
    weights = [draw.uniform(0.2, 5) for _ in range(draw.randint(1, 5))]
    block_bytes = PAGE * draw.randint(1, 8)
    sizes = {f"p{index}": draw.choice([0, 1, PAGE, draw.randint(0, 40 * PAGE)]) for index in range(20)}
    striping = stripe(sizes, block_bytes, weights)
    held, ends = [0] * len(weights), [0] * len(weights)
    for name, size in sizes.items():
        blocks = striping.pieces[name]
        assert [block.start for block in blocks] == list(range(0, size, block_bytes))
        assert sum(block.count for block in blocks) == size
        for block in blocks:
            assert 0 < block.count <= block_bytes
            assert block.offset == ends[block.path]  # right behind the one before: no gap, no overlap
            ends[block.path] = block.offset + aligned(block.count)
            held[block.path] += aligned(block.count)
            shares = [sum(held) * weight / sum(weights) for weight in weights]
            assert all(mine - share < block_bytes for mine, share in zip(held, shares, strict=True))
    assert striping.file_bytes == tuple(ends)


def test_impossible_sizes_and_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="piece 'a' has -1 bytes: must be 0 or more"):
        stripe({"a": -1}, PAGE, [1.0])
    for weight in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"weight {weight} of a path: must be a positive number"):
            stripe({"a": 1}, PAGE, [1.0, weight])
