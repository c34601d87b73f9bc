"""Memory that runs out is told with what held it, and what needs less."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from pool import Pool
from small_runs import settled, write_text

from dzero import RunError
from dzero.config import RunConfig
from dzero.trainer.build import BuiltModel
from dzero.trainer.trainer import train


def run_out(rank: int, ranks: int, run: RunConfig, folder: Path) -> str:
    """Run out of memory in the third microbatch; return what the user reads."""
    loss, calls = BuiltModel.loss, iter(range(100))

    def third(self: BuiltModel, *batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
        return loss(self, *batch)

    with (
        mock.patch.object(BuiltModel, "loss", third),
        mock.patch("dzero.trainer.trainer.Watchdog", mock.MagicMock()),
        pytest.raises(RunError) as told,
    ):
        train(run, folder, torch.device("cpu"))
    return str(told.value)


def test_it_says_what_held_the_memory(pool: Pool, tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.txt")
    (said,) = pool.run(run_out, 1, settled(text, "launch.workers=1"), tmp_path)
    assert said.startswith("rank 0 ran out of memory on cpu: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert "at its peak it held param " in said
    assert "moments " in said
    assert "Needs less: block.activation_checkpoint=full" in said
