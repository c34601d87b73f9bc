"""Which checkpoint a run of DzeroTrainer goes on from, and what it may save over."""

from __future__ import annotations

from pathlib import Path

import pytest

from dzero.integrations.trainer_checkpoints import LAST_FILE, checkpoint_to_resume


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Whole checkpoints of steps 2 and 10, and what a killed save left at step 12."""
    for step in (2, 10, 12):
        (tmp_path / f"checkpoint-{step}" / "dzero").mkdir(parents=True)
    for step in (2, 10):
        (tmp_path / f"checkpoint-{step}" / LAST_FILE).touch()
    (tmp_path / "checkpoint-notes").mkdir()
    return tmp_path


def test_a_run_goes_on_from_the_last_whole_checkpoint(output: Path) -> None:
    assert checkpoint_to_resume(output, True, saves=False) == str(output / "checkpoint-10")
    assert (output / "checkpoint-12").is_dir(), "a run that does not save moves nothing"
    assert checkpoint_to_resume(output, True, saves=True) == str(output / "checkpoint-10")
    assert sorted(each.name for each in output.iterdir()) == [
        "checkpoint-10",
        "checkpoint-2",
        "checkpoint-notes",
        "interrupted-save-12",
    ]
    with pytest.raises(ValueError, match=r"checkpoint-3: it is not there; whole checkpoints: \['.*', '.*'\]"):
        checkpoint_to_resume(output, str(output / "checkpoint-3"), saves=True)
    (output / "checkpoint-12").mkdir()
    with pytest.raises(ValueError, match=r"checkpoint-12: it was not saved to its end"):
        checkpoint_to_resume(output, str(output / "checkpoint-12"), saves=True)
    checkpoint_to_resume(output, str(output / "checkpoint-10/"), saves=True)
    assert (output / "interrupted-save-12.1").is_dir()


def test_a_run_that_would_save_over_checkpoints_is_refused(output: Path) -> None:
    assert checkpoint_to_resume(output, None, saves=False) is None
    with pytest.raises(
        ValueError, match=r"checkpoint-2 is there already, and the run would save over it: go on from it"
    ):
        checkpoint_to_resume(output, None, saves=True)
    with pytest.raises(ValueError, match=r"checkpoint-10 is there already"):
        checkpoint_to_resume(output, str(output / "checkpoint-2"), saves=True)
    with pytest.raises(ValueError, match=r"resume_from_checkpoint=True: .*/new has no whole checkpoint"):
        checkpoint_to_resume(output / "new", True, saves=True)
    assert len([*output.iterdir()]) == 4, "nothing was moved"
