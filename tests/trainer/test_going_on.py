"""A run goes on where saves fail, and never silently; what another program saved is no run's to go on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from pool import Pool, WorkerError
from published import FIXED, words
from small_runs import ran
from torch import nn
from train_runs import running

import dzero

FAILED = r"NOT SAVED, training goes on \(checkpoint\.on_error=warn\): .*checkpoints"


def blocked(folder: Path) -> None:
    """Put a file in the place of a folder, though a save may be making it anew."""
    while not folder.is_file():
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            folder.touch()


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("on_error", ["warn", "stop"])
def test_a_failed_save_is_told_loudly_and_the_next_one_succeeds(text: Path, tmp_path: Path, on_error: str) -> None:
    saving = ["train.steps=100000", "checkpoint.every=2", f"checkpoint.on_error={on_error}", "launch.workers=1"]
    with running(tmp_path, text, *saving) as run:
        run.until(r"saved checkpoints/step_\d+")
        blocked(tmp_path / "checkpoints")
        if on_error == "stop":
            assert run.end() == 1
            assert run.log.count("error: ") == 1, run.log
            assert "checkpoints" in run.log.partition("error: ")[2]
            return
        run.until(FAILED)
        (tmp_path / "checkpoints").unlink()
        (tmp_path / "checkpoints").mkdir()
        run.until(rf"{FAILED}(.|\n)*saved checkpoints/step_\d+")


class Wrapped(nn.Module):
    """A model under the names that train.py gives one of transformers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


def own_loop(rank: int, ranks: int, model: Path, folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    whole = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sharded = dzero.shard(Wrapped(whole), stage=2, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-3)
    sharded.model(torch.arange(8).view(1, 8)).backward()
    optim.step()
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=str(folder)), sharded, optim) as checkpoints:
        checkpoints.save(1, {})


def test_a_checkpoint_of_another_loop_is_refused_by_name(pool: Pool, model: Path, tmp_path: Path) -> None:
    """It says nothing of the data."""
    pool.run(own_loop, 2, model, tmp_path / "saved")
    given = words(model, tmp_path, *FIXED, "train.steps=2", f"resume.source={tmp_path / 'saved'}")
    with pytest.raises(WorkerError, match=r"step_00000001: it lacks .*stream: it was not saved by train\.py"):
        pool.run(ran, 2, given, tmp_path)
