"""What happens to a run only by chance, put into it at a named point: a loss that is NaN, no memory, odd numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from pool import Pool, WorkerError
from small_runs import settled

from dzero import RunError
from dzero.checkpoint.format import MANIFEST, Manifest, seal, unseal
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


def test_a_loss_that_is_no_number_is_skipped_on_all_ranks_or_ends_the_run(
    pool: Pool, text: Path, tmp_path: Path
) -> None:
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


def test_memory_that_runs_out_is_told_with_what_held_it_and_what_needs_less(
    pool: Pool, text: Path, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize(("rule", "moments"), [("adamw", 2), ("SGD optim.options={momentum:0.9}", 1)])
def test_the_bytes_of_states_are_counted_in_the_first_steps_alone(
    pool: Pool, text: Path, tmp_path: Path, rule: str, moments: int
) -> None:
    """What is noted of a step costs no time that grows with the model."""
    settings = ["train.steps=9", "zero.stage=2", *f"optim.rule={rule}".split(), "train.evaluate_batches=0"]
    for times, told in pool.run(asked, 2, settled(text, *settings), tmp_path):
        assert times <= LEARNING_STEPS + 1
        assert min(told["master"], told["grad"]) > 0
        assert told["moments"] == told["master"] * moments


def made(rank: int, ranks: int, run: RunConfig, folder: Path) -> None:
    Trainer(run, folder, CPU).run()


ABSURD: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "epoch": (("extra", "stream", "epoch"), 2**62, "the token stream cannot stand at epoch 4611686018427387904"),
    "skips": (("optim", "skipped_steps"), -1, "state.optim.skipped_steps: Expected `int` >= 0"),
    "sequences": (("extra", "step_sequences"), 0, "state.extra.step_sequences: Expected `int` >= 1"),
    "worse": (("extra", "held_out", "worse"), 2**60, "state.extra.held_out.worse: Expected `int` <= 9007199254740992"),
    "groups": (("optim", "groups"), [], "state.optim.groups has no parameter"),
    "parameters": (("optim", "groups"), [{"params": []}], "state.optim.groups has no parameter"),
    "scale": (("optim", "scaler"), {"scale": 0, "good_steps": 0, "bad_steps": 0}, "'scale': 0}, no scale of a loss"),
}


def test_absurd_numbers_in_a_sealed_manifest_are_refused(pool: Pool, text: Path, tmp_path: Path) -> None:
    saving = ["train.evaluate_batches=0", "checkpoint.every=1", f"checkpoint.folder={tmp_path / 'checkpoints'}"]
    pool.run(made, 1, settled(text, *saving, "train.steps=1"), tmp_path)
    manifest = tmp_path / "checkpoints" / "step_00000001" / MANIFEST
    honest = manifest.read_bytes()
    resumed = settled(text, *saving, "train.steps=2", "resume=auto")
    for keys, value, says in ABSURD.values():
        found = unseal(honest, Manifest, str(manifest))
        at = found.state
        for key in keys[:-1]:
            at = at.setdefault(key, {"loss": None, "step": 0, "worse": 0})
        at[keys[-1]] = value
        manifest.write_bytes(seal(found)[0])
        with pytest.raises(WorkerError, match=re.escape(says)):
            pool.run(made, 1, resumed, tmp_path)
