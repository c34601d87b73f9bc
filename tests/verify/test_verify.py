"""`python -m dzero verify`, as it is typed: its verdict, its exit codes, and what it leaves."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_runs import SMALL, write_text
from typed_commands import refused, typed

AGREES, NOT_COMPARED = 0, 2


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = write_text(tmp_path_factory.mktemp("data") / "words.txt")
    return ["-m", "dzero", "verify", *SMALL.split(), "train.steps=3", "verify.steps=2", f"data.path={text}"]


def test_the_command_says_that_a_run_agrees_and_leaves_nothing(words: list[str], tmp_path: Path) -> None:
    mesh = ["zero.stage=1", "mesh.dp=1", "mesh.pp=2", "mesh.pp_schedule=gpipe", "train.accumulate=2"]
    others = ["checkpoint.every=2", "profile=on", "profile.start_step=2", "profile.steps=1"]
    ended = typed(*words, *mesh, *others, cwd=tmp_path, env={"TMPDIR": str(tmp_path)})
    assert (ended.returncode, ended.stderr) == (AGREES, "")
    assert ended.stdout.splitlines()[-1].startswith("AGREES: stage 0 on the device over a pipeline and stage 0 on")
    assert "the configuration and stage 0 on the device over a pipeline: the same bits" in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("verify.steps=0", "verify.steps=0: must be a whole number ≥ 1"),
        ("verify.step=3", "verify.step: unknown key; verify has ['steps']; did you mean verify.steps=3?"),
        ("verify.steps=9", "verify.steps=9 exceeds train.steps=3; lower it, or raise that"),
        ("zero.stage=4", "zero.stage=4: choose 0, 1, 2 or 3"),
    ],
)
def test_wrong_usage_has_a_code_of_its_own(words: list[str], tmp_path: Path, setting: str, message: str) -> None:
    key = setting.partition("=")[0]
    ended = typed(*(word for word in words if word.partition("=")[0] != key), setting, cwd=tmp_path)
    refused(ended, message, code=NOT_COMPARED)
