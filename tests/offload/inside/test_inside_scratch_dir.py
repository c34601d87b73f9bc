"""Run directories: private, locked, refused to strangers; of a dead run nothing stays, of a living one everything."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from dzero import DiskError
from dzero.offload.scratch_dir import NAME, ScratchDir, holders

DEAD = "dzero-0-1-0123456789abcdef"


def plant(folder: Path, *files: str) -> Path:
    folder.mkdir()
    for name in files:
        (folder / name).write_text("4096")
    return folder


def test_a_directory_is_for_its_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with ScratchDir(str(tmp_path), 4096, rank=2) as run:
            (folder,) = tmp_path.iterdir()
            assert folder.name == run.name
            assert folder.name.startswith(f"dzero-2-{os.getpid()}-")
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
            assert [file.name for file in folder.iterdir()] == ["lock"]
            assert stat.S_IMODE((folder / "lock").stat().st_mode) == 0o600
            found = os.fstat(run.fd)
            assert (stat.S_IMODE(found.st_mode), found.st_nlink, found.st_size) == (0o600, 0, 4096)
    finally:
        os.umask(before)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("files", [(), ("lock",), ("data",), ("data", "lock")])
def test_what_a_dead_run_left_is_removed(tmp_path: Path, files: tuple[str, ...]) -> None:
    """Wherever it was killed; `data` without `lock` cannot come about by itself and stays for a person to see."""
    plant(tmp_path / DEAD, *files)
    with ScratchDir(str(tmp_path), 0) as run:
        expected = {run.name} | ({DEAD} if files == ("data",) else set())
        assert set(os.listdir(tmp_path)) == expected


def test_what_is_not_ours_or_not_known_stays(tmp_path: Path) -> None:
    """Of another user, which only root can make, too."""
    names = ["dzero-0-1", "dzero-a-1-0123456789abcdef", f"{DEAD}0", "notes", DEAD]
    for name in names:
        plant(tmp_path / name, "data", "lock")
    (tmp_path / DEAD / "thesis.txt").touch()
    if os.geteuid() == 0:
        names.append(DEAD.replace("0123", "3210"))
        os.chown(plant(tmp_path / names[-1], "data", "lock"), 12345, 12345)
    ScratchDir(str(tmp_path), 0).close()
    assert sorted(os.listdir(tmp_path)) == sorted(names)
    assert all(sorted(os.listdir(tmp_path / name)) == ["data", "lock"] for name in names if name != DEAD)
    assert "thesis.txt" in os.listdir(tmp_path / DEAD)


def test_symbolic_links_are_never_followed(tmp_path: Path) -> None:
    victim, path = plant(tmp_path / "victim", "data", "lock"), tmp_path / "path"
    path.mkdir()
    (tmp_path / "link").symlink_to(path)
    for name in ("link", "link/"):
        with pytest.raises(DiskError, match=f"not followed: name the directory itself, {path}") as told:
            ScratchDir(f"{tmp_path}/{name}", 0)
        assert told.value.errno == errno.ELOOP
    (path / DEAD).symlink_to(victim)
    planted = plant(path / DEAD.replace("0123", "3210"))
    (planted / "lock").symlink_to(victim / "lock")
    with ScratchDir(str(path), 4096):
        pass
    assert os.listdir(planted) == ["lock"]
    assert sorted(os.listdir(victim)) == ["data", "lock"]
    with pytest.raises(DiskError, match="is there already"):
        ScratchDir(str(path), 0, name=DEAD)
    assert sorted(os.listdir(victim)) == ["data", "lock"]


def test_more_than_there_is_fails_before_a_block_is_taken_and_changes_nothing(tmp_path: Path) -> None:
    with ScratchDir(str(tmp_path), 4096) as run:
        os.pwrite(run.fd, b"first", 0)
        run.grow(8192)
        with pytest.raises(DiskError, match="rank 5 needs 1024 PiB of scratch space; ") as told:
            ScratchDir(str(tmp_path), 1 << 60, rank=5)
        assert told.value.errno == errno.ENOSPC
        listed = f"1 other runs hold 8.00 KiB ({run.name} 8.00 KiB): free space, or name more or larger paths"
        assert listed in str(told.value)
        with pytest.raises(DiskError, match="rank 0 needs 1024 PiB more of scratch space; ") as told:
            run.grow((1 << 60) + 8192)
        assert told.value.errno == errno.ENOSPC
        assert os.listdir(tmp_path) == [run.name]
        assert holders(str(tmp_path)) == [(run.name, 8192)]
        assert os.fstat(run.fd).st_blocks * 512 >= os.fstat(run.fd).st_size == run.needed_bytes == 8192
        assert os.pread(run.fd, 5, 0) == b"first"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_a_growth_took_before_it_failed_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    reserve = os.posix_fallocate

    def half(fd: int, offset: int, count: int) -> None:
        reserve(fd, offset, count // 2)
        raise OSError(code, os.strerror(code))

    with ScratchDir(str(tmp_path), 4096) as run:
        monkeypatch.setattr(os, "posix_fallocate", half)
        with pytest.raises(DiskError) as told:
            run.grow(9 * 4096)
        assert (told.value.errno, told.value.count) == (code, 8 * 4096)
        assert os.fstat(run.fd).st_size == 4096


def test_a_run_whose_directory_was_deleted_goes_on_and_ends(tmp_path: Path) -> None:
    with ScratchDir(str(tmp_path), 4096) as run:
        shutil.rmtree(tmp_path / run.name)
        os.pwrite(run.fd, b"still here", 0)
        assert os.pread(run.fd, 10, 0) == b"still here"
    assert os.listdir(tmp_path) == []


def test_blocks_are_given_back_at_the_end_even_if_a_forked_child_has_the_file_open(tmp_path: Path) -> None:
    run = ScratchDir(str(tmp_path), 1 << 20)
    childs = os.dup(run.fd)
    run.close()
    assert (os.fstat(childs).st_size, os.fstat(childs).st_blocks) == (0, 0)
    os.close(childs)


def test_a_fault_at_the_end_is_told_and_the_rest_is_given_back(tmp_path: Path) -> None:
    run = ScratchDir(str(tmp_path), 4096)
    (tmp_path / run.name / "thesis.txt").touch()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="not empty"):
        run.close()
    assert os.listdir(tmp_path / run.name) == ["thesis.txt"]
    assert len(os.listdir("/proc/self/fd")) == before - 4


def test_many_that_start_and_tidy_up_at_once_never_harm_each_other(tmp_path: Path) -> None:
    """Locks belong to open files, so threads contend as processes do: a directory is swept before it is locked, too."""
    failures: list[BaseException] = []
    before = len(os.listdir("/proc/self/fd"))

    def start_and_end(rank: int) -> None:
        try:
            for turn in range(60):
                with ScratchDir(str(tmp_path), 4096, rank=rank) as run:
                    os.pwrite(run.fd, bytes([rank]) * 64, 0)
                    assert (tmp_path / run.name / "lock").exists(), turn
                    assert run.name in [name for name, _ in holders(str(tmp_path))]
                    assert os.pread(run.fd, 64, 0) == bytes([rank]) * 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=start_and_end, args=(rank,)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_directory_swept_before_its_lock_is_made_again_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both moments: before the lock file is there, and between its making and its locking."""
    really_open, swept = os.open, []

    def sweep_first(name: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if NAME.fullmatch(str(name)) and len(swept) < 1:
            swept.append(name)
            os.rmdir(name, dir_fd=dir_fd)
        fd = really_open(name, flags, mode, dir_fd=dir_fd)
        if name == "lock" and flags & os.O_CREAT and len(swept) < 2:
            swept.append(name)
            shutil.rmtree(next(tmp_path.iterdir()))
        return fd

    monkeypatch.setattr(os, "open", sweep_first)
    with ScratchDir(str(tmp_path), 4096) as run:
        assert len(swept) == 2
        assert os.listdir(tmp_path) == [run.name]
        assert os.listdir(tmp_path / run.name) == ["lock"]
    assert os.listdir(tmp_path) == []
