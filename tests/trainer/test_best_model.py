"""The model of the lowest held-out loss is kept, exported, and remembered by a run that resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from small_runs import CONF
from test_finetune import CHATS, model, words  # noqa: F401  (a fixture)

from dzero import CheckpointError, RunError
from dzero.checkpoint.export_hf import export, plan
from dzero.checkpoint.reader import Checkpoint
from dzero.data.corpus import load
from dzero.overrides import composed
from dzero.trainer import checkpointing
from dzero.trainer.checkpointing import RunCheckpoints
from dzero.trainer.held_out import Evaluation, HeldOutRecord
from dzero.trainer.trainer import Trainer

safetensors = pytest.importorskip("safetensors.torch")


def ran(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, Any]:
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    before = trainer.held_out.state_dict()
    steps = trainer.done_steps
    if steps < trainer.config.train.steps:
        steps += trainer.run().steps
    return {"before": before, "after": trainer.held_out.state_dict(), "losses": trainer.held_out.losses, "steps": steps}


def closed(rank: int, ranks: int, settings: list[str], folder: Path) -> int:
    """Start a finished run again."""
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    assert trainer.is_done
    trainer.close()
    return trainer.done_steps


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").glob("step*"))


WAYS = {
    "parameters": ["zero.stage=3", "offload=host"],
    "adapters": ["adapter=lora", "zero.stage=2", "adapter.target_modules=[q_proj,lm_head]"],
}
WORSE = ["optim.lr=10", "optim.betas=[0.9,0.999]", "schedule.kind=constant", "schedule.warmup_steps=24"]
"""Each step moves every parameter by more than all steps before it: logits grow with the square of the steps, and the
held-out loss with them. The first evaluation is the best one, on any machine."""


@pytest.mark.parametrize("way", WAYS)
def test_the_best_checkpoint_is_kept_and_exported_and_a_resumed_run_knows_it(
    pool: Pool,
    model: Path,  # noqa: F811
    tmp_path: Path,
    way: str,
) -> None:
    if way == "adapters":
        pytest.importorskip("peft")
    settings = words(model, tmp_path, *WORSE, "train.epochs=12", "train.evaluate_every_steps=2", *WAYS[way])
    settings += ["train.answers=0", f"checkpoint.folder={tmp_path / 'saved'}", "checkpoint.every=3"]
    settings += ["checkpoint.keep=1", "checkpoint.keep_best=true", "export.which=best"]
    found = pool.run(ran, 2, [*settings, "train.patience=3"], tmp_path)[0]
    losses, steps = found["losses"], found["steps"]
    at = losses.index(min(losses))
    best, last = 2 * (at + 1), 2 * len(losses)
    assert steps == last == best + 6
    assert saved(tmp_path) == [f"step_{best:08d}", f"step_{last:08d}"]
    assert found["after"] == {"loss": min(losses), "step": best, "worse": 3}
    name = "adapter_model.safetensors" if way == "adapters" else "model.safetensors"
    exported = safetensors.load_file(tmp_path / "model" / name)
    if way == "parameters":
        for step in (best, last):
            with Checkpoint(tmp_path / "saved" / f"step_{step:08d}") as checkpoint:
                export(tmp_path / str(step), plan(checkpoint, "bf16"))
        wanted, other = (safetensors.load_file(tmp_path / str(step) / name) for step in (best, last))
        assert exported.keys() == wanted.keys()
        assert all(torch.equal(exported[key], wanted[key]) for key in wanted)
        assert not all(torch.equal(exported[key], other[key]) for key in other)
    finished = [*settings, "train.patience=3", "resume=auto", f"export.folder={tmp_path / 'late'}"]
    for _ in range(2):  # the second time, the folder of the export exists
        assert pool.run(closed, 2, finished, tmp_path)[0] == steps
    assert saved(tmp_path) == [f"step_{best:08d}", f"step_{last:08d}"]
    late = safetensors.load_file(tmp_path / "late" / name)
    assert late.keys() == exported.keys()
    assert all(torch.equal(late[key], exported[key]) for key in late)
    settings += ["resume=auto", "export.at_end=false", "export.which=last"]
    again = pool.run(ran, 1, [*settings, "train.patience=6", "train.accumulate=2"], tmp_path)[0]
    assert again["before"] == found["after"]
    assert min(again["losses"]) >= min(losses), "of these data, nothing better comes"
    assert saved(tmp_path)[0] == f"step_{best:08d}"
    assert again["after"]["worse"] == min(6, 3 + len(again["losses"]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["export.which=best"], "export.which=best with checkpoint.keep_best=false: the model of the lowest"),
        (["export.which=first"], "export.which='first': choose last or best"),
        (["checkpoint.keep_best=true"], "checkpoint.keep_best=true has no effect with checkpoint.every=null"),
        (
            ["checkpoint.every=1", "checkpoint.keep_best=true", "data.held_out=0"],
            "checkpoint.keep_best=true with data.held_out=0: there is no held-out loss",
        ),
    ],
)
def test_a_best_that_cannot_be_is_refused_in_one_line(
    model: Path,  # noqa: F811
    tmp_path: Path,
    settings: list[str],
    message: str,
) -> None:
    with pytest.raises(RunError, match=message):
        composed([*words(model, tmp_path), *settings], CONF)


@pytest.mark.parametrize("setting", ["train.patience=2", "checkpoint.keep_best=true"])
def test_a_best_of_data_too_small_to_hold_out_anything_is_refused(
    model: Path,  # noqa: F811
    tmp_path: Path,
    setting: str,
) -> None:
    (tmp_path / "one.jsonl").write_text(CHATS.read_text().splitlines()[0])
    settings = [word for word in words(model, tmp_path) if not word.startswith("data.path")]
    config = composed([*settings, f"data.path={tmp_path / 'one.jsonl'}", "checkpoint.every=1", setting], CONF)
    corpus = load(config.data, config.model_folder, config.train.sequence_tokens)
    with pytest.raises(ValueError, match=f"{setting}: nothing of .*one.jsonl.* is held out; give more data"):
        Evaluation(config, corpus, built=None, multiple=1, slices={})  # type: ignore[arg-type]


class Saved:
    """Checkpoints of which the save of step 4, the best, failed; that of step 2 is the best of the others."""

    resumed = ""

    def best(self) -> Path:
        return Path("saved/step_00000002")

    def resume(self, which: str) -> None:
        self.resumed = which


@pytest.mark.parametrize(("last", "taken"), [(3.0, "after step 6"), (8.0, "after step 2")])
def test_where_the_best_was_not_saved_the_best_of_the_others_is_exported(
    monkeypatch: pytest.MonkeyPatch, last: float, taken: str
) -> None:
    monkeypatch.setattr(checkpointing, "manifest_at", lambda _: None)
    monkeypatch.setattr(checkpointing, "held_out_loss", lambda _: 7.0)
    saves, record = RunCheckpoints.__new__(RunCheckpoints), HeldOutRecord()
    for step, loss in ((2, 7.0), (4, 2.5), (6, last)):
        record.add(step, loss)
    saves._checkpoints, saves._held_out = Saved(), record  # type: ignore[assignment]
    said = saves.load_best(6)
    assert said == (
        f"NOT THE BEST: the model after step 4, with a held-out loss of 2.5, was not saved, so that {taken} is exported"
    )
    assert saves._checkpoints.resumed == ("" if last < 7.0 else "saved/step_00000002")  # type: ignore[union-attr]


class Damaged(Saved):
    """Checkpoints of which the best cannot be read."""

    def resume(self, which: str) -> None:
        raise CheckpointError(which, "bytes are missing")


def test_a_best_that_is_damaged_is_reported_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointing, "manifest_at", lambda _: None)
    monkeypatch.setattr(checkpointing, "held_out_loss", lambda _: 7.0)
    saves, record = RunCheckpoints.__new__(RunCheckpoints), HeldOutRecord()
    for step, loss in ((2, 7.0), (4, 8.0)):
        record.add(step, loss)
    saves._checkpoints, saves._held_out = Damaged(), record  # type: ignore[assignment]
    with pytest.raises(CheckpointError, match=r"step_00000002: bytes are missing; it is the best: .*export.which=last"):
        saves.load_best(4)
