"""The model of the lowest held-out loss is kept, exported, and remembered by a run that resumes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import dzero as command
from pool import Pool, WorkerError
from published import chats_of, words
from safetensors.torch import load_file
from small_runs import ran

EVERY, PATIENCE = 2, 2
WAYS = {
    "parameters": ["zero.stage=3"],
    "adapters": ["adapter=lora", "zero.stage=2", "adapter.target_modules=[q_proj,lm_head]"],
}
WORSE = ["optim.lr=10", "optim.betas=[0.9,0.999]", "schedule.kind=constant", "schedule.warmup_steps=24"]
"""Each step moves every parameter by more than all steps before it: logits grow with the square of the steps, and the
held-out loss with them, which so stops falling long before the last step. Where, the test reads from the losses."""


def record(losses: list[float], known: dict[str, Any] | None = None) -> dict[str, Any]:
    """The lowest loss, its step, and how many evaluations came after it; `known` is that of the run before."""
    lowest = dict(known or {"loss": None, "step": 0, "worse": 0})
    first = lowest["step"] + EVERY * lowest["worse"]
    for number, loss in enumerate(losses, 1):
        if lowest["loss"] is None or loss < lowest["loss"]:
            lowest = {"loss": loss, "step": first + EVERY * number, "worse": 0}
        else:
            lowest["worse"] += 1
    return lowest


def alike(file: Path, other: Path) -> bool:
    """Whether two files have the same tensors."""
    one, two = load_file(file), load_file(other)
    assert one.keys() == two.keys()
    return all(torch.equal(value, two[name]) for name, value in one.items())


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "saved").glob("step*"))


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("way", WAYS)
def test_the_best_checkpoint_is_kept_exported_and_known(pool: Pool, model: Path, tmp_path: Path, way: str) -> None:
    given = [*words(model, tmp_path, *WORSE, *WAYS[way]), "data.held_out=0.3", "train.steps=40", "train.epochs=null"]
    given += [f"train.evaluate_every_steps={EVERY}", "train.answers=0", f"checkpoint.folder={tmp_path / 'saved'}"]
    given += ["checkpoint.every=3", "checkpoint.keep=1", "checkpoint.keep_best=true", "export.which=best"]
    found = pool.run(ran, 2, [*given, f"train.patience={PATIENCE}"], tmp_path)[0]
    lowest = record(found.held_out)
    assert found.best == lowest
    assert lowest["worse"] == PATIENCE
    assert found.steps == EVERY * len(found.held_out) == lowest["step"] + EVERY * PATIENCE
    best, last = f"step_{lowest['step']:08d}", f"step_{found.steps:08d}"
    assert saved(tmp_path) == [best, last]

    name = "model.safetensors" if way == "parameters" else "adapter_model.safetensors"
    for step in (best, last):
        made = command("export", tmp_path / "saved" / step, tmp_path / step)
        assert made.returncode == 0, made.stderr
    assert alike(tmp_path / "model" / name, tmp_path / best / name)
    assert not alike(tmp_path / "model" / name, tmp_path / last / name)

    shutil.copytree(tmp_path / "saved", tmp_path / "kept")
    again = [*given, f"train.patience={PATIENCE}", "resume=auto"]
    for told in ("exported to ", "not exported again: "):
        closed = pool.run(ran, 2, [*again, "export.folder=late"], tmp_path)[0]
        assert (closed.steps, closed.losses) == (found.steps, [])
        assert told in closed.told
    assert alike(tmp_path / "late" / name, tmp_path / best / name)
    assert saved(tmp_path) == [best, last]

    again = [word for word in again if not word.startswith("checkpoint.folder")]
    again += [f"checkpoint.folder={tmp_path / 'kept'}", "export.folder=other"]
    os.truncate(next((tmp_path / "kept" / best).glob("*.safetensors")), 64)
    with pytest.raises(WorkerError, match=rf"{best}.*; it is the best: .*export\.which=last"):
        pool.run(ran, 2, again, tmp_path)
    shutil.rmtree(tmp_path / "kept" / best)
    lost = f"NOT THE BEST: the model after step {lowest['step']}, with a held-out loss of {lowest['loss']}, was not"
    assert f"{lost} saved, so that after step {found.steps} is exported" in pool.run(ran, 2, again, tmp_path)[0].told
    assert alike(tmp_path / "other" / name, tmp_path / last / name)

    more = [*given, f"train.patience={2 * PATIENCE}", "train.accumulate=2", "resume=auto", "export.at_end=false"]
    gone_on = pool.run(ran, 1, [*more, "export.which=last"], tmp_path)[0]
    assert gone_on.best == record(gone_on.held_out, lowest)
    assert saved(tmp_path)[0] == f"step_{gone_on.best['step']:08d}"


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("setting", ["train.patience=2", "checkpoint.keep_best=true"])
def test_a_best_without_held_out_data_is_refused(pool: Pool, model: Path, tmp_path: Path, setting: str) -> None:
    (tmp_path / "one.jsonl").write_text(chats_of(model).read_text().splitlines()[0])
    own = [f"data.path={tmp_path / 'one.jsonl'}", "data.held_out=1e-9", "checkpoint.every=1", setting]
    with pytest.raises(WorkerError, match=f"{setting}: nothing of .*one.jsonl.* is held out; give more data"):
        pool.run(ran, 1, [*words(model, tmp_path), *own], tmp_path)
