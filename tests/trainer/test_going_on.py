"""A run goes on through losses that are no number, saves that fail, and other numbers of ranks; never silently."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pool import Pool, WorkerError
from small_runs import settled, write_text

from dzero.checkpoint.format import MANIFEST, Manifest, seal, unseal
from dzero.config import RunConfig
from dzero.data.batch import Batch
from dzero.monitor.sinks import Monitor
from dzero.trainer.trainer import Trainer

SECONDS = 300.0


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


class Went(NamedTuple):
    """`notes`: what the log was told, by rank 0; `samples`: the windows this rank trained on, step by step."""

    notes: list[str]
    losses: list[float]
    skipped_steps: int
    params: dict[str, torch.Tensor]
    samples: list[list[int]]


class Observed(Trainer):
    """Tells what it saw. At `nan_step` rank 1 adds a NaN to its loss that has no gradient."""

    def __init__(self, run: RunConfig, folder: Path, nan_step: int | None = None) -> None:
        super().__init__(run, folder, torch.device("cpu"))
        self.went = Went([], self.recorder.losses, 0, {}, [])
        self.nan_step, self.forwards = nan_step, self.done_steps * self.microbatches
        read = self.stream.sequences.read

        def observed(indices: Any) -> Batch:
            self.went.samples.append(indices.tolist())
            return read(indices)

        self.stream.sequences.read = observed  # type: ignore[method-assign]
        self._loss_of = self.built.loss
        self.built.loss = self._loss  # type: ignore[method-assign]

    def _loss(self, batch: Batch, share: float) -> torch.Tensor:
        loss = self._loss_of(batch, share)
        self.forwards += 1
        if self.rank == 1 and self.forwards == self.nan_step:
            return loss + torch.tensor(torch.nan)
        return loss


def watched(rank: int, ranks: int, run: RunConfig, folder: Path, hurt: str = "", nan_step: int | None = None) -> Went:
    """A run; `hurt`: a folder that is replaced by a file while step 3 is made, and made again while step 5 is."""
    trainer = Observed(run, folder, nan_step)
    notes, note, after = trainer.went.notes, Monitor.note, trainer.saves.after

    def noting(self: Monitor, step: int, message: str) -> None:
        notes.append(f"{step}: {message}")
        note(self, step, message)

    def hurting(step: int, *args: Any, **kwargs: Any) -> bool:
        if hurt and rank == 0 and step == 3:
            while Path(hurt).is_dir():  # a save that is under way works there, too
                shutil.rmtree(hurt, ignore_errors=True)
            Path(hurt).touch()
        if hurt and rank == 0 and step == 5:
            Path(hurt).unlink()
            Path(hurt).mkdir()
        return after(step, *args, **kwargs)

    trainer.saves.after = hurting  # type: ignore[method-assign]
    Monitor.note = noting  # type: ignore[method-assign]
    try:
        summary = trainer.run()
    finally:
        Monitor.note = note  # type: ignore[method-assign]
    trainer.optim.synchronize()
    params = {name: p.full_tensor().detach().clone() for name, p in trainer.sharded.named_params().items()}
    return trainer.went._replace(skipped_steps=summary.skipped_steps, params=params)


def test_a_loss_that_is_no_number_is_skipped_on_all_ranks_and_told(pool: Pool, text: Path, tmp_path: Path) -> None:
    """Its gradients are finite, so nothing else would notice."""
    settings = ["train.steps=2", "schedule.kind=constant", "zero.stage=3"]
    one = pool.run(watched, 2, settled(text, *settings, "train.steps=1"), tmp_path, timeout_s=SECONDS)
    two = pool.run(watched, 2, settled(text, *settings), tmp_path, "", 2, timeout_s=SECONDS)
    assert [went.skipped_steps for went in two] == [1, 1]
    assert any(note == "2: skipped, not finite: the loss of rank 1" for note in two[0].notes)
    for went in two:
        assert np.isnan(went.losses[-1])
        assert all(torch.equal(went.params[name], one[0].params[name]) for name in one[0].params)


def test_on_nan_stop_ends_the_run_with_the_rank_and_the_repair(pool: Pool, text: Path, tmp_path: Path) -> None:
    run = settled(text, "train.on_nan=stop")
    with pytest.raises(WorkerError, match=r"step 2: the loss of rank 1 is not finite, and train.on_nan=stop"):
        pool.run(watched, 2, run, tmp_path, "", 2, timeout_s=SECONDS)


def test_a_failed_save_is_told_loudly_and_the_next_one_succeeds(pool: Pool, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    saving = ["train.steps=8", "checkpoint.every=2", f"checkpoint.folder={folder}"]
    warned = settled(text, *saving, "checkpoint.on_error=warn")
    went = pool.run(watched, 2, warned, tmp_path, str(folder), timeout_s=SECONDS)[0]
    loud = [note for note in went.notes if "NOT SAVED, training goes on (checkpoint.on_error=warn)" in note]
    assert loud
    assert all(str(folder) in note for note in loud)
    assert any(note.endswith("step_00000008") and "saved" in note for note in went.notes), went.notes
    assert len(went.losses) == 8
    fresh = tmp_path / "fresh"
    stopping = settled(text, *saving, f"checkpoint.folder={fresh}")
    with pytest.raises(
        WorkerError, match=r"(CheckpointError|CheckpointDamaged): .*fresh"
    ):  # by where the save meets the file
        pool.run(watched, 2, stopping, tmp_path, str(fresh), timeout_s=SECONDS)


def test_another_number_of_ranks_keeps_the_batch_and_takes_every_sample_once(
    pool: Pool, text: Path, tmp_path: Path
) -> None:
    elastic = ["train.accumulate=null", "train.global_sequences=8", "train.microbatch_sequences=2", "zero.stage=3"]
    elastic += ["checkpoint.every=2", f"checkpoint.folder={tmp_path / 'checkpoints'}", "train.evaluate_batches=0"]
    taken: list[int] = []
    for ranks, steps in ((2, 2), (4, 4), (1, 6)):
        run = settled(text, *elastic, f"train.steps={steps}", f"launch.workers={ranks}", "resume=auto")
        told = pool.run(watched, ranks, run, tmp_path, timeout_s=SECONDS)
        microbatches = [len(went.samples) for went in told]
        assert microbatches == [2 * 8 // (2 * ranks)] * ranks
        taken += [window for index in range(microbatches[0]) for went in told for window in went.samples[index]]
    alone = settled(text, *elastic[:4], "train.evaluate_batches=0", "train.steps=6", "launch.workers=1")
    order = pool.run(watched, 1, alone, tmp_path, timeout_s=SECONDS)[0].samples
    assert len(set(taken)) == len(taken) == 6 * 8
    assert taken == [window for windows in order for window in windows]


def test_a_checkpoint_of_another_loop_is_refused_by_name(pool: Pool, text: Path, tmp_path: Path) -> None:
    """It says nothing of the data."""
    saving = ["train.evaluate_batches=0", "checkpoint.every=1", f"checkpoint.folder={tmp_path / 'checkpoints'}"]
    pool.run(watched, 2, settled(text, *saving, "train.steps=1"), tmp_path, timeout_s=SECONDS)
    manifest = tmp_path / "checkpoints" / "step_00000001" / MANIFEST
    found = unseal(manifest.read_bytes(), Manifest, str(manifest))
    found.state["extra"].pop("stream")
    manifest.write_bytes(seal(found)[0])
    resumed = settled(text, *saving, "train.steps=2", "resume=auto")
    with pytest.raises(WorkerError, match=r"step_00000001: it lacks stream: it was not saved by train\.py"):
        pool.run(watched, 2, resumed, tmp_path, timeout_s=SECONDS)


ABSURD: dict[str, tuple[tuple[str, ...], Any, str]] = {
    "epoch": (("extra", "stream", "epoch"), 2**62, "the token stream cannot stand at epoch 4611686018427387904"),
    "skips": (("optim", "skipped_steps"), -1, "state.optim.skipped_steps: Expected `int` >= 0"),
    "sequences": (("extra", "step_sequences"), 0, "state.extra.step_sequences: Expected `int` >= 1"),
    "worse": (("extra", "held_out", "worse"), 2**60, "state.extra.held_out.worse: Expected `int` <= 9007199254740992"),
    "groups": (("optim", "groups"), [], "state.optim.groups has no parameter"),
    "parameters": (("optim", "groups"), [{"params": []}], "state.optim.groups has no parameter"),
    "scale": (
        ("optim", "scaler"),
        {"scale": 0, "good_steps": 0, "bad_steps": 0},
        "'scale': 0}, no scale of a loss",
    ),
}


def test_absurd_numbers_in_a_sealed_manifest_are_refused(pool: Pool, text: Path, tmp_path: Path) -> None:
    saving = ["train.evaluate_batches=0", "checkpoint.every=1", f"checkpoint.folder={tmp_path / 'checkpoints'}"]
    pool.run(watched, 1, settled(text, *saving, "train.steps=1"), tmp_path, timeout_s=SECONDS)
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
            pool.run(watched, 1, resumed, tmp_path, timeout_s=SECONDS)
