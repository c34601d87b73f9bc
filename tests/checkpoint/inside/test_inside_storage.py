"""Boxes of tensors, the reading of them, and buffers beside a GPU; records of held-out losses that are no numbers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
import written_checkpoints as by_hand
from written_checkpoints import PAGE, raw

from dzero import streams
from dzero.checkpoint.box import Box, covered, is_contiguous
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.reader import Checkpoint
from dzero.offload import memory_pool
from dzero.trainer.held_out import HeldOutRecord


def some_box(draw: random.Random, shape: tuple[int, ...], least: int = 0) -> Box:
    """A box within `shape`, of at least so many along each dim."""
    offset = tuple(draw.randint(0, whole - least) for whole in shape)
    return Box(offset, tuple(draw.randint(least, whole - first) for first, whole in zip(offset, shape, strict=True)))


@pytest.mark.parametrize(("ranks", "pages"), [(1, 1), (2, 3), (5, 4096)])
def test_any_box_is_read_bit_for_bit_from_any_ranks_parts(tmp_path: Path, ranks: int, pages: int) -> None:
    draw, tensors = random.Random(ranks), by_hand.mixed()
    pieces = by_hand.scattered(draw, tensors, ranks)
    with Checkpoint(by_hand.write(tmp_path / "ck", pieces, block_bytes=pages * PAGE)) as checkpoint:
        assert set(checkpoint.names) == set(tensors)
        boxes = [
            (name, box)
            for name, tensor in tensors.items()
            for box in [Box.whole(tuple(tensor.shape)), *(some_box(draw, tuple(tensor.shape)) for _ in range(12))]
        ]
        for (name, box), together in zip(boxes, checkpoint.read_all(boxes), strict=True):
            found, want = checkpoint.read(name, box), tensors[name][box.slices(Box.whole(tuple(tensors[name].shape)))]
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            assert raw(found) == raw(together) == raw(want), (name, box)


def test_boxes_that_are_cut_cover_what_they_were_cut_from_and_overlaps_are_found() -> None:
    """Against a mask: 400 random sets of boxes, half of them with one box twice or shifted."""
    draw = random.Random(0)
    for number in range(400):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4)))
        boxes = [Box(tuple(offset), tuple(size)) for offset, size in by_hand.cut(draw, shape, 6)]
        boxes += [some_box(draw, shape)] if number % 2 else []
        boxes = [box for box in boxes if box.elems]
        draw.shuffle(boxes)
        count = torch.zeros(shape, dtype=torch.int64)
        for box in boxes:
            count[box.slices(Box.whole(shape))] += 1
        if int(count.max()) > 1:
            with pytest.raises(ValueError, match="two parts overlap"):
                covered(boxes)
        else:
            assert covered(boxes) == int(count.sum())


def test_a_box_is_contiguous_where_its_elements_follow_each_other() -> None:
    """Against torch's own indexing."""
    draw, kinds = random.Random(0), set()
    for _ in range(2000):
        within = some_box(draw, (4, 3, 2, 3), 1)
        inner = some_box(draw, within.size, 1)
        box = Box(tuple(map(sum, zip(inner.offset, within.offset, strict=True))), inner.size)
        at = torch.arange(within.elems).view(within.size)[box.slices(within)].flatten()
        follow = bool((at.diff() == 1).all())
        assert is_contiguous(box, within) == follow
        if follow:
            assert box.span(within) == (int(at[0]), int(at[-1]) + 1)
        kinds.add(follow)
    assert kinds == {True, False}
    assert Box((), ()).span(Box((), ())) == (0, 1)


def test_rows_of_one_expert_are_read_without_the_others(tmp_path: Path) -> None:
    """Blocks of 16 KiB: 8 rows of 4 KiB within an expert lie in three of them at most."""
    fused = torch.randn(4, 64, 1024)
    path = by_hand.write(tmp_path / "ck", by_hand.in_rows({"master.experts": fused}, 1), block_bytes=16384)
    with Checkpoint(path) as checkpoint:
        checkpoint.read("master.experts", Box((0, 0, 0), (1, 1, 1024)))  # buffers are made
        before = read_bytes()
        found = checkpoint.read("master.experts", Box((2, 30, 0), (1, 8, 1024)))
        assert 0 < read_bytes() - before <= 3 * 16384 + 2048
        assert torch.equal(found, fused[2:3, 30:38])


def read_bytes() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_beside_a_gpu_touched_buffers_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the device of the rank, which the background thread that touches them has to choose first."""
    done: list[object] = []
    monkeypatch.setattr(streams, "set_device", lambda device: done.append(device))
    monkeypatch.setattr(memory_pool, "_page_lock", lambda memory: done.append(memory.numel()) or False)
    IOBuffers(2, block_bytes=PAGE, device=torch.device("cuda", 1)).touch()
    assert done == [torch.device("cuda", 1), memory_pool.HUGE_PAGE_BYTES]
    IOBuffers(2, block_bytes=PAGE, device=torch.device("cpu")).touch()
    assert len(done) == 3


def test_a_loss_that_is_not_finite_is_no_best_but_counts_for_patience() -> None:
    record, losses = HeldOutRecord(), [float("nan"), float("nan"), 3.0, 2.0, float("nan"), 1.5, float("inf")]
    for step, loss in enumerate(losses):
        record.add(step, loss)
        assert record.is_best(step) is (loss in (3.0, 2.0, 1.5))
        if step == 1:
            assert record.state_dict() == {"loss": None, "step": record.state_dict()["step"], "worse": 1}
    assert record.state_dict() == {"loss": 1.5, "step": 5, "worse": 1}
