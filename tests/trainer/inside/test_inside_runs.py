"""What happens to a run only by chance, put into it at a named point: a loss that is NaN, no memory, odd numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pool import Pool, WorkerError
from small_runs import settled

from dzero import Checkpointer, CheckpointError, RunError
from dzero.config import RunConfig
from dzero.trainer.build import BuiltModel
from dzero.trainer.metrics import LEARNING_STEPS
from dzero.trainer.trainer import Trainer, train

CPU = torch.device("cpu")


def at_microbatch(number: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the loss of this process's `number`-th microbatch, counted from 0."""
    loss, calls = BuiltModel.loss, iter(range(1000))

    def changed(self: BuiltModel, *batch: Any) -> torch.Tensor:
        found = loss(self, *batch)
        return change(found) if next(calls) == number else found

    return mock.patch.object(BuiltModel, "loss", changed)


def with_a_nan(rank: int, ranks: int, run: RunConfig, folder: Path) -> tuple[list[float], int, dict[str, torch.Tensor]]:
    """At step 2 rank 1 adds a NaN to its loss that has no gradient; losses, skipped steps and parameters."""
    trainer = Trainer(run, folder, CPU)
    with at_microbatch(1, lambda loss: loss + torch.tensor(torch.nan) if rank == 1 else loss):
        summary = trainer.run()
    params = {name: p.full_tensor().detach().clone() for name, p in trainer.sharded.named_params().items()}
    return trainer.recorder.losses, summary.skipped_steps, params


def test_a_loss_that_is_no_number_is_skipped_or_ends_the_run(pool: Pool, text: Path, tmp_path: Path) -> None:
    """Its gradients are finite, so nothing else would notice."""
    settings = ["train.steps=2", "schedule.kind=constant", "zero.stage=3", "train.evaluate_batches=0"]
    one = pool.run(with_a_nan, 2, settled(text, *settings, "train.steps=1"), tmp_path)
    two = pool.run(with_a_nan, 2, settled(text, *settings), tmp_path)
    for (losses, skipped, params), (_, _, before) in zip(two, one, strict=True):
        assert skipped == 1
        assert np.isnan(losses[-1])
        assert all(torch.equal(params[name], before[name]) for name in before)
    with pytest.raises(WorkerError, match=r"step 2: the loss of rank 1 is not finite, and train.on_nan=stop"):
        pool.run(with_a_nan, 2, settled(text, *settings, "train.on_nan=stop"), tmp_path)


def with_the_best_unsaved(rank: int, ranks: int, run: RunConfig, folder: Path) -> str:
    """The save after the last step fails; what is said of the model that is exported."""

    def fail(self: Checkpointer, step: int, *given: Any) -> None:
        if step == run.train.steps:
            raise CheckpointError("", "no room")
        save(self, step, *given)

    save = Checkpointer.save
    with mock.patch.object(Checkpointer, "save", fail), redirect_stdout(StringIO()) as told:
        Trainer(run, folder, CPU).run()
    return told.getvalue()


def test_a_best_model_that_could_not_be_saved_is_exported(pool: Pool, text: Path, tmp_path: Path) -> None:
    settings = ["train.steps=2", "train.evaluate_every_steps=1", "export.at_end=true", "export.which=best"]
    saves = ["checkpoint.every=1", "checkpoint.keep_best=true", f"checkpoint.folder={tmp_path / 'saved'}"]
    told = pool.run(with_the_best_unsaved, 1, settled(text, *settings, *saves, "checkpoint.on_error=warn"), tmp_path)
    assert re.search("NOT SAVED(.|\n)*the best model is that of the last step", told[0])


def out_of_memory(_: torch.Tensor) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")


def run_out(rank: int, ranks: int, run: RunConfig, folder: Path) -> str:
    """What the user reads when memory runs out in the third microbatch."""
    with (
        at_microbatch(2, out_of_memory),
        mock.patch("dzero.trainer.trainer.Watchdog", mock.MagicMock()),
        pytest.raises(RunError) as told,
    ):
        train(run, folder, CPU)
    return str(told.value)


def test_memory_that_runs_out_is_told_with_what_held_it(pool: Pool, text: Path, tmp_path: Path) -> None:
    (said,) = pool.run(run_out, 1, settled(text, "launch.workers=1"), tmp_path)
    assert said.startswith("rank 0 ran out of memory on cpu: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    assert "at its peak it held param " in said
    assert "moments " in said
    assert "Needs less: block.activation_checkpoint=full" in said


def asked(rank: int, ranks: int, run: RunConfig, folder: Path) -> tuple[int, dict[str, int]]:
    """How often the optimizer is asked for the bytes of its states, and what is told of them at the end."""
    trainer = Trainer(run, folder, CPU)
    with mock.patch.object(trainer.optim, "state_bytes", wraps=trainer.optim.state_bytes) as measure:
        summary = trainer.run()
        times = measure.call_count
    return times, dict(summary.peak_bytes[rank])


def test_the_bytes_of_states_are_counted_in_the_first_steps_alone(pool: Pool, text: Path, tmp_path: Path) -> None:
    """What is noted of a step costs no time that grows with the model."""
    settings = ["train.steps=9", "zero.stage=2", "train.evaluate_batches=0"]
    settings += ["optim.rule=SGD", "optim.options={momentum:0.9}"]
    for times, told in pool.run(asked, 2, settled(text, *settings), tmp_path):
        assert times <= LEARNING_STEPS + 1
        assert min(told["master"], told["grad"]) > 0
        assert told["moments"] == told["master"]
