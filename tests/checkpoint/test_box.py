"""Boxes of tensors, compared with torch's own indexing."""

from __future__ import annotations

import random
from pathlib import Path

import by_hand
import torch

from dzero.checkpoint.box import Box, is_contiguous
from dzero.checkpoint.reader import Checkpoint


def drawn(draw: random.Random, shape: tuple[int, ...]) -> Box:
    """A box within `shape` that is not empty."""
    offset = tuple(draw.randint(0, whole - 1) for whole in shape)
    return Box(offset, tuple(draw.randint(1, whole - first) for first, whole in zip(offset, shape, strict=True)))


def test_a_box_is_contiguous_where_its_elements_follow_each_other() -> None:
    draw, kinds = random.Random(0), set()
    for _ in range(2000):
        within = drawn(draw, (4, 3, 2, 3))
        inner = drawn(draw, within.size)
        box = Box(tuple(o + w for o, w in zip(inner.offset, within.offset, strict=True)), inner.size)
        at = torch.arange(within.elems).view(within.size)[box.slices(within)].flatten()
        follow = bool((at.diff() == 1).all())
        assert is_contiguous(box, within) == follow
        if follow:
            assert box.span(within) == (int(at[0]), int(at[-1]) + 1)
        kinds.add(follow)
    assert kinds == {True, False}
    assert is_contiguous(Box((), ()), Box((), ()))
    assert Box((), ()).span(Box((), ())) == (0, 1)


def test_rows_of_one_expert_are_read_without_the_others(tmp_path: Path) -> None:
    """Blocks of 16 KiB: 8 rows of 4 KiB within an expert lie in three of them at most."""
    fused = torch.randn(4, 64, 1024)
    path = by_hand.write(tmp_path / "ck", {"master.experts": fused}, block_bytes=16384)
    with Checkpoint(path) as checkpoint:
        checkpoint.read("master.experts", Box((0, 0, 0), (1, 1, 1024)))  # buffers are made
        before = read_bytes()
        found = checkpoint.read("master.experts", Box((2, 30, 0), (1, 8, 1024)))
        assert 0 < read_bytes() - before <= 3 * 16384 + 2048
        assert torch.equal(found, fused[2:3, 30:38])


def read_bytes() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])
