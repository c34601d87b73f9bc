"""A folder of checkpoints loses none of another run: a run counts and removes its own line of ancestors only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pool import Pool
from shelves import write
from small_runs import ROOT, settled, train, write_text
from train_runs import SMALLEST, TORCHRUN

from dzero import CheckpointError
from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.selection import candidates, keep, refuse_foreign
from dzero.checkpoint.store import LATEST, LOCK, CheckpointStore, manifest_at

SECONDS = 400.0
SMALL = [*SMALLEST, "launch.workers=2", "launch.threads=1", "zero.stage=3"]
A, B, C, D = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


@pytest.fixture(scope="module")
def made(pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 4 of a run, and one that it left half-written."""
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    run = settled(
        text, *SMALL, "train.steps=4", "checkpoint.every=1", "checkpoint.keep=9", f"checkpoint.folder={folder}"
    )
    pool.run(train, 2, run, folder.parent, timeout_s=SECONDS)
    (folder / "step_00000005.partial").mkdir()
    return folder


def command(folder: Path, text: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """`python train.py` in `folder`."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
    small = [word for word in SMALL if not launcher or "workers" not in word]
    line = [sys.executable, *launcher, str(ROOT / "train.py"), *small, f"data.path={text}", *words]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below but the lock, and every folder."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.name != LOCK}
    return {str(name): path.read_bytes() if path.is_file() else b"" for name, path in found.items()}


def test_a_run_that_does_not_resume_refuses_the_folder_of_another_and_changes_nothing(
    made: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "checkpoints")
    saving = ["train.steps=3", "checkpoint.every=1", "checkpoint.keep=1"]
    ended = command(tmp_path, text, *saving, "model.hidden_size=64")
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: checkpoints: it holds 4 checkpoints of another run (run ")
    assert (
        "the newest step_00000004; none was touched: resume=auto goes on from them, checkpoint.folder=NEW"
        in ended.stderr
    )
    assert ended.stderr.count("\n") == 1
    assert "step=1" not in ended.stdout
    assert contents(tmp_path / "checkpoints") == contents(made)


@pytest.mark.full
def test_a_run_that_went_back_keeps_its_own_newest_and_leaves_the_branch_that_it_left(
    made: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "checkpoints")
    saving = ["train.steps=4", "checkpoint.every=1", "checkpoint.keep=2"]
    ended = command(tmp_path, text, *saving, "resume=checkpoints/step_00000002")
    assert ended.returncode == 0, ended.stderr
    left = ["step_00000003", "step_00000003_2", "step_00000004", "step_00000004_2"]
    shelf = CheckpointStore(tmp_path / "checkpoints")
    assert shelf.names() == left
    assert shelf.latest() == "step_00000004_2"
    assert candidates(shelf, []) == ["step_00000004_2", "step_00000003_2"]
    assert {name: data for name, data in contents(shelf.path).items() if name.split("/")[0] in left[::2]} == {
        name: data for name, data in contents(made).items() if name.split("/")[0] in left[::2]
    }


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "--standalone", "--nproc-per-node=2")], ids=["plain", "torchrun"])
def test_a_finished_run_started_again_says_so_and_ends_with_0(
    made: Path, text: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    shutil.copytree(made, tmp_path / "checkpoints")
    ended = command(tmp_path, text, "train.steps=4", "checkpoint.every=1", "resume=auto", launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    assert "nothing is left to train: 4 steps were made, train.steps=4\n" in ended.stdout
    assert "step=" not in ended.stdout
    assert CheckpointStore(tmp_path / "checkpoints").names() == CheckpointStore(made).names()


@pytest.mark.full
def test_every_run_of_a_sweep_saves_in_its_own_output_folder(text: Path, tmp_path: Path) -> None:
    sweep_of = ["train.seed=0,1", "train.steps=1", "checkpoint.every=1"]
    ended = command(tmp_path, text, *sweep_of, "--multirun")
    assert ended.returncode == 0, ended.stderr
    (sweep,) = (tmp_path / "multirun").glob("*/*")
    folders = [sweep / f"train.seed={seed}" / "checkpoints" for seed in (0, 1)]
    assert [CheckpointStore(folder).names() for folder in folders] == [["step_00000001"]] * 2
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.full
def test_runs_of_a_sweep_share_an_absolute_folder_and_lose_nothing_of_each_other(text: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    saving = ["train.steps=2", "checkpoint.every=1", "checkpoint.keep=1", f"checkpoint.folder={kept}"]
    ended = command(tmp_path, text, "train.seed=0,1", *saving, "launch.workers=1", "--multirun")
    assert ended.returncode == 0, ended.stderr
    shelves = [CheckpointStore(kept / f"train.seed={seed}") for seed in (0, 1)]
    assert sorted(kept.iterdir()) == [shelf.path for shelf in shelves]
    assert [shelf.names() for shelf in shelves] == [["step_00000002"]] * 2
    runs = {manifest_at(shelf.path / "step_00000002").origin for shelf in shelves}
    assert len(runs) == 2


# The rules, on manifests alone


def shelf_of(folder: Path, *saved: tuple[Lineage, int]) -> CheckpointStore:
    """Checkpoints of nothing, saved one after the other."""
    for lineage, step in saved:
        write(folder, step, [{}], lineage=lineage)
    return CheckpointStore(folder)


def test_steps_of_an_abandoned_branch_and_of_another_run_neither_count_nor_go(tmp_path: Path) -> None:
    first, back, other = Lineage(A), Lineage(B, ((A, 10),)), Lineage(C)
    shelf = shelf_of(
        tmp_path, (first, 5), (first, 10), (first, 20), (other, 30), (Lineage(), 40), (back, 12), (back, 16)
    )
    assert keep(shelf, 2, back) == ["step_00000005", "step_00000010"]
    assert shelf.names() == [f"step_{step:08d}" for step in (12, 16, 20, 30, 40)]
    assert candidates(shelf, []) == ["step_00000016", "step_00000012"]
    again = Lineage(D, ((A, 10), (B, 16)))
    assert keep(shelf, 1, again) == ["step_00000012"]  # 16 is what the pointer names
    assert keep(shelf, 1, other) == []


def test_what_was_saved_but_not_pointed_to_is_resumed_from_and_only_on_the_pointers_branch(tmp_path: Path) -> None:
    first, back = Lineage(A), Lineage(B, ((A, 10),))
    shelf = shelf_of(tmp_path, (first, 10), (first, 20), (back, 12), (back, 14))
    shelf.point("step_00000012", back)
    assert candidates(shelf, []) == ["step_00000014", "step_00000012", "step_00000010"]
    shelf.point("step_00000020", first)
    assert candidates(shelf, []) == ["step_00000020", "step_00000010"]
    (tmp_path / LATEST).unlink()
    assert candidates(shelf, []) == ["step_00000014", "step_00000012", "step_00000010"]  # 14 was saved last


def test_a_lost_checkpoint_that_the_pointer_names_is_followed_by_its_ancestors(tmp_path: Path) -> None:
    first, again = Lineage(A), Lineage(B, ((A, 10),))
    shelf = shelf_of(tmp_path, (Lineage(C), 90), (first, 5), (first, 10), (first, 15), (again, 12))
    shutil.rmtree(tmp_path / "step_00000012")
    assert candidates(shelf, []) == ["step_00000012", "step_00000010", "step_00000005"]


def test_a_checkpoint_of_another_folder_opens_no_folder_of_another_run(tmp_path: Path) -> None:
    mine, foreign = shelf_of(tmp_path / "mine", (Lineage(A), 10)), shelf_of(tmp_path / "foreign", (Lineage(C), 5))
    source = mine.path / "step_00000010"
    lineage = manifest_at(source).origin.resumed(manifest_at(source).step)
    refuse_foreign(mine, lineage, source)
    refuse_foreign(CheckpointStore(tmp_path / "new"), lineage, source)
    shutil.copytree(mine.path, tmp_path / "copy")
    refuse_foreign(CheckpointStore(tmp_path / "copy"), lineage, source)  # its own ancestors
    for each in (lineage, Lineage(D)):
        with pytest.raises(
            CheckpointError, match=r"it holds 1 checkpoints of another run \(run cccccccc\), the newest"
        ):
            refuse_foreign(foreign, each, source if each is lineage else None)
    (foreign.path / "step_00000005" / "manifest.json").write_bytes(b"?")
    with pytest.raises(CheckpointError, match="it holds 1 checkpoints of another run, the newest step_00000005"):
        refuse_foreign(foreign, Lineage(D), None)
