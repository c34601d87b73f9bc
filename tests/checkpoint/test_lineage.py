"""A folder of checkpoints loses none of another run: a run counts and removes its own line of ancestors only."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from small_runs import settled, train, write_text
from torch import nn
from train_runs import SMALLEST, TORCHRUN
from typed_commands import refused, typed
from written_checkpoints import LATEST, LOCK, body_of, names, write_sealed

import dzero
from dzero import CheckpointConfig, Checkpointer, CheckpointError

SMALL = [*SMALLEST, "launch.threads=1", "zero.stage=3", "launch.workers=1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


@pytest.fixture(scope="module")
def made(pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 3 of a run, and one that it left half-written."""
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    saves = ["checkpoint.every=1", "checkpoint.keep=9", f"checkpoint.folder={folder}"]
    pool.run(train, 1, settled(text, *SMALL, "train.steps=3", *saves), folder.parent)
    (folder / "step_00000004.partial").mkdir()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below but the lock, and every folder."""
    found = {path.relative_to(folder): path for path in folder.rglob("*") if path.name != LOCK}
    return {str(name): path.read_bytes() if path.is_file() else b"" for name, path in found.items()}


def test_a_run_that_does_not_resume_refuses_the_folder_of_another_and_changes_nothing(
    made: Path, text: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path / "checkpoints")
    words = [*SMALL, f"data.path={text}", "checkpoint.every=1", "checkpoint.keep=1"]
    ended = typed("train.py", *words, "model.hidden_size=64", cwd=tmp_path)
    told = refused(ended, "error: checkpoints: it holds 3 checkpoints of another run (run ", "the newest step_00000003")
    assert "none was touched: resume=auto goes on from them, checkpoint.folder=NEW" in told
    assert "step=1" not in ended.stdout
    assert contents(tmp_path / "checkpoints") == contents(made)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("launcher", [(), (*TORCHRUN, "--standalone", "--nproc-per-node=1")], ids=["plain", "torchrun"])
def test_a_finished_run_started_again_says_so_and_ends_with_0(
    made: Path, text: Path, tmp_path: Path, launcher: tuple[str, ...]
) -> None:
    shutil.copytree(made, tmp_path / "checkpoints")
    words = [*SMALL, f"data.path={text}", "train.steps=3", "checkpoint.every=1", "resume=auto"]
    program = str(Path(__file__).parents[2] / "train.py")
    ended = typed(*launcher, program, *(word for word in words if not launcher or "workers" not in word), cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "nothing is left to train: 3 steps were made, train.steps=3\n" in ended.stdout
    assert "step=" not in ended.stdout
    assert names(tmp_path / "checkpoints") == names(made)


@pytest.mark.full("tests/checkpoint/test_lineage.py::test_a_run_keeps_and_resumes_from_its_own_line_alone")
@pytest.mark.parametrize("shared", [False, True])
def test_runs_of_a_sweep_save_in_folders_of_their_own(text: Path, tmp_path: Path, shared: bool) -> None:
    """In their output folders, or in one each of an absolute folder; they lose nothing of each other."""
    kept = tmp_path / "kept"
    words = [*SMALL, f"data.path={text}", "train.seed=0,1", "train.steps=2", "checkpoint.every=1", "checkpoint.keep=1"]
    where = [f"checkpoint.folder={kept}"] if shared else []
    ended = typed("train.py", *words, *where, "--multirun", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    shelves = sorted(kept.iterdir() if shared else tmp_path.glob("multirun/*/*/*/checkpoints"))
    assert [names(shelf) for shelf in shelves] == [["step_00000002"]] * 2
    assert len({body_of(shelf / "step_00000002" / "manifest.json")["run"] for shelf in shelves}) == 2
    assert not (tmp_path / "checkpoints").exists()


# The rules, by runs that save nothing but their steps


class Shelf:
    """A folder of checkpoints, and runs of a small model that save there; names are of steps, and of attempts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sharded = dzero.shard(nn.Linear(2, 2), stage=1, precision="fp32")
        self.optim = dzero.AdamW(self.sharded)

    def checkpoints(self, folder: Path, **settings: Any) -> Checkpointer:
        return Checkpointer(CheckpointConfig(folder=str(folder), **settings), self.sharded, self.optim)

    def run(self, *saves: tuple[int, Any] | int, resume: str = "", **settings: Any) -> list[str]:
        """A run that may resume, and saves steps, with held-out losses where they are given; what is there then.

        Without `resume`, it is another run, whose checkpoints come from a folder of their own.
        """
        folder = self.folder if resume or not names(self.folder) else self.folder.parent / "another"
        with self.checkpoints(folder, **{"keep": 9, **settings}) as checkpoints:
            if resume:
                found = checkpoints.resume("auto" if resume == "auto" else str(self.folder / resume))
                assert found is not None
                self.resumed = found.path.name
            for save in saves:
                step, loss = save if isinstance(save, tuple) else (save, None)
                checkpoints.save(step, {"held_out_loss": loss})
            best = checkpoints.best()
            self.best = None if best is None else best.name
        if folder != self.folder:
            for name in (*names(folder), LATEST):
                (folder / name).replace(self.folder / name)
            shutil.rmtree(folder)
        return [name.removeprefix("step_").lstrip("0") for name in names(self.folder)]

    def pointer(self) -> Any:
        return body_of(self.folder / LATEST)

    def goes_on_from(self, count: int) -> list[str]:
        """What a run would resume from, one after the other as each loses its data; the folder is then as it was."""
        found: list[str] = []
        aside = self.folder.parent / "aside"
        shutil.copytree(self.folder, aside)
        for _ in range(count):
            self.run(resume="auto")
            found.append(self.resumed.removeprefix("step_").lstrip("0"))
            (self.folder / self.resumed / "rank_00000.safetensors").unlink()
        shutil.rmtree(self.folder)
        aside.rename(self.folder)
        return found

    def refused(self, folder: Path, resume: str = "") -> str:
        """What is said to a run that begins in a folder, if it is refused there."""
        with self.checkpoints(folder) as checkpoints:
            if resume:
                checkpoints.resume(str(self.folder / resume))
            try:
                checkpoints.begin()
            except CheckpointError as error:
                return str(error)
        return ""


def branches(shelf: Shelf) -> None:
    """A run that went back, another run's checkpoint, and a run that went on from the branch."""
    shelf.run(5, 10, 20)
    shelf.run(30)
    shelf.run(12, 16, resume="step_00000010")
    assert shelf.goes_on_from(4) == ["16", "12", "10", "5"]
    assert shelf.run(17, resume="auto", keep=2) == ["16", "17", "20", "30"]
    assert shelf.run(18, resume="step_00000016", keep=1) == ["17", "18", "20", "30"]


def not_pointed_to(shelf: Shelf) -> None:
    """What was saved after the pointer was moved for the last time counts, on the pointer's branch."""
    shelf.run(10, 20)
    first = shelf.pointer()
    shelf.run(12, resume="step_00000010")
    before = shelf.pointer()
    shelf.run(14, resume="auto")
    write_sealed(shelf.folder / LATEST, before)
    assert shelf.goes_on_from(3) == ["14", "12", "10"]
    write_sealed(shelf.folder / LATEST, first)
    assert shelf.goes_on_from(2) == ["20", "10"]
    (shelf.folder / LATEST).unlink()
    assert shelf.goes_on_from(3) == ["14", "12", "10"]  # 14 was saved last


def lost(shelf: Shelf) -> None:
    """A lost checkpoint that the pointer names is followed by its ancestors."""
    shelf.run(90)
    shelf.run(5, 10, 15)
    shelf.run(12, resume="step_00000010")
    shutil.rmtree(shelf.folder / "step_00000012")
    assert shelf.goes_on_from(2) == ["10", "5"]


def again(shelf: Shelf) -> None:
    """The same step saved again sorts behind what is there."""
    shelf.run(4, 5)
    shelf.run(5, resume="step_00000004")
    assert shelf.run(5, resume="step_00000004") == ["4", "5", "5_2", "5_3"]
    shutil.rmtree(shelf.folder / "step_00000005")
    assert shelf.run(5, 3, resume="step_00000004") == ["3", "4", "5_2", "5_3", "5_4"]


def foreign(shelf: Shelf) -> None:
    """A checkpoint of another folder opens no folder of another run; a copy of its own folder is its own."""
    shelf.run(10)
    parent, other = shelf.folder.parent, Shelf(shelf.folder.parent / "other")
    shutil.copytree(shelf.folder, parent / "copy")
    other.run(5)
    assert shelf.refused(parent / "copy", "step_00000010") == shelf.refused(parent / "new", "step_00000010") == ""
    assert "it holds 1 checkpoints of another run (run " in shelf.refused(other.folder, "step_00000010")
    (other.folder / "step_00000005" / "manifest.json").write_bytes(b"?")
    assert "it holds 1 checkpoints of another run, the newest step_00000005" in shelf.refused(other.folder)


def best_stays(shelf: Shelf) -> None:
    """The best stays beside the last ones until there is a better one; what is no number is no loss."""
    assert shelf.run((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, 1.0), keep=1, keep_best=True) == ["2", "5"]
    assert shelf.best == "step_00000002"
    assert shelf.run((6, 0.5), (7, 0.75), resume="auto", keep=1, keep_best=True) == ["6", "7"]
    for number, loss in enumerate((True, "1.0", [1.0], {"loss": 1.0}, float("nan"))):
        shelf.run((8 + number, loss), resume="auto", keep=1, keep_best=True)
        assert shelf.best == "step_00000006"
    assert shelf.run(20, resume="auto", keep=1) == ["20"]
    assert shelf.best is None


def best_of_others(shelf: Shelf) -> None:
    """The best of other runs and branches neither counts nor goes."""
    shelf.run((1, 4.0), (2, 3.0), (3, 1.0))
    shelf.run((4, 0.5))
    assert shelf.run((5, 3.5), (6, 3.6), resume="step_00000002", keep=1, keep_best=True) == ["2", "3", "4", "6"]
    assert shelf.best == "step_00000002"


RULES = (branches, not_pointed_to, lost, again, foreign, best_stays, best_of_others)


def by_the_rules(rank: int, ranks: int, folder: Path) -> None:
    for rule in RULES:
        (folder / rule.__name__).mkdir()
        rule(Shelf(folder / rule.__name__ / "shelf"))


def test_a_run_keeps_and_resumes_from_its_own_line_alone(pool: Pool, tmp_path: Path) -> None:
    pool.run(by_the_rules, 1, tmp_path)
