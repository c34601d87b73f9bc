"""Partitioned activations (ZeRO, section 6.1): ranks of tp keep their part of each block's input, on any tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_runs
import torch
from pool import Pool

from dzero.config import RunConfig
from dzero.trainer.trainer import Trainer

LAYERS, TOKENS, WIDTH, SEQUENCES = 5, 64, 64, 2
INPUT_BYTES = SEQUENCES * TOKENS * WIDTH * 2
"""Input of a block, of one microbatch in bf16."""


def losses_and_slots(rank: int, ranks: int, run: RunConfig, folder: Path) -> tuple[list[float], list[int]]:
    """Losses of a run, and the sizes in bytes of what this rank's activations took off the device."""
    trainer = Trainer(run, folder, torch.device("cpu"))
    trainer.run()
    moving = trainer.optim.offload.activations
    return trainer.recorder.losses, [] if moving is None else sorted(moving.pool.seat_bytes.values())


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_each_rank_of_tp_keeps_its_part_of_a_blocks_input(pool: Pool, tmp_path: Path, tier: str) -> None:
    settings = ["mesh.tp=2", "model.kv_heads=2", "block.activation_checkpoint=full", "block.compile=false"]
    settings += [f"model.layers={LAYERS}", f"model.hidden_size={WIDTH}", f"train.sequence_tokens={TOKENS}"]
    text = small_runs.write_text(tmp_path / "text.txt")
    disk = [f"offload.disk.paths=[{tmp_path}]"] if tier == "disk" else []
    on_device, off_device = (
        pool.run(losses_and_slots, 2, small_runs.settled(text, *settings, *each), tmp_path / f"run_{len(each)}")
        for each in ([], [f"offload.activations={tier}", *disk])
    )
    for (expected, none), (losses, slots) in zip(on_device, off_device, strict=True):
        assert losses == expected
        assert none == []
        assert {*slots} == {INPUT_BYTES // 2}
        assert len(slots) >= LAYERS - 1  # the last block's input may stay
