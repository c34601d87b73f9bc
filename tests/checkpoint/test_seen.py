"""Ranks that do not see the same folder of checkpoints are named, before anything is saved or resumed."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from pool import Pool
from training_loops import sharded_net

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError
from dzero.checkpoint.store import CheckpointStore

HOST = socket.gethostname()


def told(rank: int, ranks: int, folder: Path) -> list[str]:
    """Of saving in folders of which ranks 2 and 3 have another, and of resuming from one that they do not have."""
    here = folder / ("one" if rank < 2 else "other")
    sharded, found = sharded_net(stage=3), list[str]()
    optim = AdamW(sharded)
    try:
        Checkpointer(CheckpointConfig(folder=str(here), every=1), sharded, optim)
    except CheckpointError as error:
        found.append(str(error))
    with Checkpointer(CheckpointConfig(folder=str(folder / "shared"), every=1), sharded, optim) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.finish()
        if rank == 0:
            shutil.copytree(folder / "shared", folder / "one" / "copy")
        try:
            checkpoints.resume(str(here / "copy"))
        except CheckpointError as error:
            found.append(str(error))
        resumed = checkpoints.resume("auto")
        assert resumed is not None
        assert resumed.step == 1
    return found


def test_ranks_that_see_another_folder_are_named_with_their_machines(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    seen = f"seen by ranks 0-1 on {HOST}, but not by ranks 2-3 on {HOST}: checkpoint.folder must name one folder that"
    for rank, (saving, resuming) in enumerate(pool.run(told, 4, tmp_path)):
        here = tmp_path / ("one" if rank < 2 else "other")
        assert saving.startswith(f"{here}: {seen} all nodes share")
        assert resuming.startswith(f"{here}/copy/step_00000001: {seen}")
    assert CheckpointStore(tmp_path / "one").names() == CheckpointStore(tmp_path / "other").names() == []
