"""The reading of boxes of tensors and of published weights, buffers beside a GPU, and held-out losses of no number.

They look inside, because of boxes that no cut of a run has, bytes that are counted as they are read, and a GPU.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import written_checkpoints as by_hand
from pool import Pool
from small_mixtures import VOCAB, mixture, tokens
from torch import Tensor
from written_checkpoints import PAGE, raw

import dzero
from dzero import streams, testing
from dzero.checkpoint.box import Box
from dzero.checkpoint.import_hf import blank, fill
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.reader import Checkpoint
from dzero.models.build import build, weights_of
from dzero.models.config import ModelConfig
from dzero.models.meta_init import MetaInitializer
from dzero.offload import memory_pool
from dzero.trainer.held_out import HeldOutRecord


def read_bytes() -> int:
    """By this process so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


OTHERS = 2048
"""Bytes that are read meanwhile: the reading of the counter itself, wake-ups of threads."""


@pytest.mark.parametrize(("ranks", "pages"), [(1, 1), (2, 3), (5, 4096)])
def test_any_box_is_read_bit_for_bit_from_any_ranks_parts(tmp_path: Path, ranks: int, pages: int) -> None:
    """Boxes whose elements follow each other in a part, and others."""
    draw, tensors = random.Random(ranks), by_hand.mixed()
    pieces = by_hand.scattered(draw, tensors, ranks)
    boxes = []
    for name, tensor in tensors.items():
        boxes.append((name, Box.whole(tuple(tensor.shape))))
        for _ in range(12):
            offset = tuple(draw.randint(0, size) for size in tensor.shape)
            size = tuple(draw.randint(0, end - first) for first, end in zip(offset, tensor.shape, strict=True))
            boxes.append((name, Box(offset, size)))
    with Checkpoint(by_hand.write(tmp_path / "ck", pieces, block_bytes=pages * PAGE)) as checkpoint:
        assert set(checkpoint.names) == set(tensors)
        for (name, box), together in zip(boxes, checkpoint.read_all(boxes), strict=True):
            found, want = checkpoint.read(name, box), tensors[name][box.slices(Box.whole(tuple(tensors[name].shape)))]
            assert (found.dtype, found.shape) == (want.dtype, want.shape)
            assert raw(found) == raw(together) == raw(want), (name, box)


def test_rows_of_one_expert_are_read_without_the_others(tmp_path: Path) -> None:
    """Blocks of 16 KiB: 8 rows of 4 KiB within an expert lie in three of them at most."""
    fused = torch.randn(4, 64, 1024)
    path = by_hand.write(tmp_path / "ck", by_hand.in_rows({"master.experts": fused}, 1), block_bytes=16384)
    with Checkpoint(path) as checkpoint:
        checkpoint.read("master.experts", Box((0, 0, 0), (1, 1, 1024)))  # buffers are made
        before = read_bytes()
        found = checkpoint.read("master.experts", Box((2, 30, 0), (1, 8, 1024)))
        assert 0 < read_bytes() - before <= 3 * 16384 + OTHERS
        assert torch.equal(found, fused[2:3, 30:38])


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


# Of published weights each rank reads the bytes that it keeps, before there is an optimizer; logits are theirs

SIZES = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn_size": 48, "experts": 4, "top_k": 2}
OURS = ModelConfig(kind="moe", **SIZES, balance="none", rope_theta=1e6)


def filled(rank: int, ranks: int, ours: bool, stage: int, source: Path) -> tuple[int, int, Tensor, str]:
    """Bytes that were read and that this rank keeps, logits, and what filling it with an optimizer says."""
    config = (
        replace(OURS, weights=str(source)) if ours else ModelConfig(kind="hf", name_or_path=str(source), weights=True)
    )
    model = build(config, VOCAB)
    weights = weights_of(config, model)
    zeros = MetaInitializer(model, seed=0, device="cpu", weights=blank(model, weights))
    cut = dzero.parallelize(model, dzero.make_mesh("cpu"), dzero.ParallelConfig(ep=ranks)) if ours else model
    sharded = dzero.shard(cut, stage=stage, init=zeros, precision="fp32")
    before = read_bytes()
    fill(sharded, weights)
    read = read_bytes() - before
    kept = sum(4 * testing.local(param).numel() for param in sharded.named_params().values())
    with torch.no_grad():
        logits = sharded.model.eval()(tokens())
    sharded.reshard()
    optim = dzero.AdamW(sharded)
    with pytest.raises(RuntimeError) as late:
        fill(sharded, weights)
    optim.synchronize()
    return read, kept, logits, str(late.value)


@pytest.mark.parametrize(("ours", "stage", "ranks"), [(False, 3, 2), (False, 1, 2), (True, 3, 2)])
def test_a_rank_reads_what_it_keeps(pool: Pool, tmp_path: Path, ours: bool, stage: int, ranks: int) -> None:
    theirs = mixture("mixtral", num_local_experts=4)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    want = theirs(tokens()).logits
    for read, kept, logits, late in pool.run(filled, ranks, ours, stage, tmp_path):
        assert 0 <= read - kept < OTHERS
        # The same fp32 values; the outputs of the chosen experts are summed in another order.
        torch.testing.assert_close(logits, want, rtol=1e-5, atol=1e-6)
        assert "fill it before making one" in late
