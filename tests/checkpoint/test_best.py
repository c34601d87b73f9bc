"""The checkpoint of the lowest held-out loss of a run stays, and no other run's is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shelves import write

from dzero.checkpoint.lineage import Lineage
from dzero.checkpoint.selection import best, held_out_loss, keep
from dzero.checkpoint.store import CheckpointStore, manifest_at
from dzero.trainer.held_out import HeldOutRecord

A, B, C = (Lineage(letter * 32) for letter in "abc")


def shelf_of(folder: Path, *saved: tuple[Lineage, int, Any]) -> CheckpointStore:
    """Checkpoints of nothing with their held-out losses, saved one after the other."""
    for lineage, step, loss in saved:
        write(folder, step, [{}], lineage=lineage, extra={"held_out_loss": loss})
    return CheckpointStore(folder)


def test_the_best_stays_beside_the_last_ones_until_there_is_a_better_one(tmp_path: Path) -> None:
    shelf = shelf_of(tmp_path, (A, 1, 3.0), (A, 2, 1.0), (A, 3, None), (A, 4, 2.0), (A, 5, 1.0))
    assert best(shelf, A) == "step_00000002"
    assert keep(shelf, 1, A, keep_best=True) == ["step_00000001", "step_00000003", "step_00000004"]
    assert shelf.names() == ["step_00000002", "step_00000005"]
    shelf_of(tmp_path, (A, 6, 0.5), (A, 7, 0.75))
    assert keep(shelf, 1, A, keep_best=True) == ["step_00000002", "step_00000005"]
    assert shelf.names() == ["step_00000006", "step_00000007"]
    assert keep(shelf, 1, A) == ["step_00000006"]


def test_the_best_of_other_runs_and_branches_neither_counts_nor_goes(tmp_path: Path) -> None:
    back = Lineage(C.run, ((A.run, 2),))
    shelf = shelf_of(tmp_path, (A, 1, 4.0), (A, 2, 3.0), (A, 3, 1.0), (B, 4, 0.5), (back, 5, 3.5), (back, 6, 3.6))
    assert [best(shelf, each) for each in (A, B, back)] == ["step_00000003", "step_00000004", "step_00000002"]
    assert keep(shelf, 1, back, keep_best=True) == ["step_00000001", "step_00000005"]
    assert shelf.names() == [f"step_{step:08d}" for step in (2, 3, 4, 6)]
    assert best(shelf, Lineage("d" * 32)) is None


@pytest.mark.parametrize("loss", [None, True, "1.0", [1.0], {"loss": 1.0}])
def test_a_manifest_without_a_number_has_no_loss_and_is_never_the_best(tmp_path: Path, loss: Any) -> None:
    shelf = shelf_of(tmp_path, (A, 1, loss), (A, 2, 9.0), (A, 3, loss))
    assert held_out_loss(manifest_at(tmp_path / "step_00000001")) is None
    assert best(shelf, A) == "step_00000002"
    assert keep(shelf, 1, A, keep_best=True) == ["step_00000001"]


def test_the_record_of_the_lowest_loss_goes_on_where_it_was_saved() -> None:
    losses = [3.0, 2.0, 2.0, float("nan"), 2.5, 1.5, float("inf")]
    whole = HeldOutRecord()
    for step, loss in enumerate(losses, 1):
        whole.add(step, loss)
        if step == 3:
            resumed = HeldOutRecord()
            resumed.load_state_dict(whole.state_dict())
    for step, loss in enumerate(losses[3:], 4):
        assert not resumed.is_best(step)
        resumed.add(step, loss)
        assert resumed.is_best(step) is (step == 6)
        assert resumed.loss_at(step) == (loss if step in (5, 6) else None)
    assert whole.state_dict() == resumed.state_dict() == {"loss": 1.5, "step": 6, "worse": 1}


def test_a_loss_that_is_not_finite_is_no_best_and_is_saved_as_none() -> None:
    record = HeldOutRecord()
    record.add(0, float("nan"))
    record.add(1, float("nan"))
    assert not record.is_best(1)
    assert record.worse == 1  # so that patience ends a run that only gives NaN
    assert record.state_dict()["loss"] is None
    record.add(2, 5.0)
    assert record.is_best(2)
    record.add(3, float("nan"))
    assert record.worse == 1
