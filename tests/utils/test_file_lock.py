"""File systems without locks (Lustre, NFS without them): runs go on, say so, and remove nothing of others."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from dzero.checkpoint.store import PARTIAL, CheckpointStore
from dzero.offload.scratch_dir import ScratchDir, holders
from dzero.utils.file_lock import take


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS], ids=errno.errorcode.get)
def without_locks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flock fails as it does there."""

    def fail(*_: Any) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", fail)


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert take(first) is True
    assert take(second) is False
    os.close(first)
    assert take(second) is True
    os.close(second)


@pytest.mark.usefixtures("without_locks")
def test_checkpoints_are_saved_and_what_may_be_another_runs_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = CheckpointStore(tmp_path / "shelf")
    with caplog.at_level(logging.WARNING), shelf.locked():
        (left := shelf.path / f"step_00000001{PARTIAL}").mkdir()
        assert shelf.clean() == []
        assert left.is_dir()
        assert shelf.begin(1) == "step_00000001_2"
    assert "has no locks, so a second run that saves here would not be noticed" in caplog.text


@pytest.mark.usefixtures("without_locks")
def test_scratch_space_is_taken_and_that_of_others_stays(tmp_path: Path) -> None:
    with ScratchDir(str(tmp_path), 4096) as first, ScratchDir(str(tmp_path), 4096) as second:
        assert {each.name for each in holders(str(tmp_path))} == {first.name, second.name}
        assert all((tmp_path / each.name).is_dir() for each in (first, second))


def test_other_errors_of_a_lock_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error"):
        take(0)
