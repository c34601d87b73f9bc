"""What a disk, a neighbour or a signal can do to the store, done really: every fault is told, or leaves no trace."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import dzero

from dzero import DiskConfig, DiskError
from dzero.offload.disk import DiskStore
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.scratch_dir import holders

CASES = Path(__file__).parent / "disk_cases.py"
HOUSE = Path(__file__).parent.parent.parent
PAGE, MIB = 4096, 1 << 20


def buffer(count: int, seed: int | None = None) -> torch.Tensor:
    data = HostMemoryPool(count).lease(count, "buffer").data
    return data if seed is None else data.copy_(torch.randint(0, 256, (count,)))


def start(*words: object, before: str = "") -> subprocess.Popen[str]:
    """A case in a process of its own; `before`: shell commands, in a namespace where anybody may mount."""
    command = [sys.executable, str(CASES), *map(str, words)]
    if before:
        command = ["unshare", "-rm", "sh", "-c", f'set -e; {before}; exec "$@"', "sh", *command]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | {"PYTHONPATH": str(HOUSE)}, **pipes)


def result(process: subprocess.Popen[str]) -> Any:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@contextmanager
def running(*words: object) -> Iterator[subprocess.Popen[str]]:
    """A case that says when it holds its store; killed at the end, if it still lives."""
    process = start(*words)
    try:
        assert process.stdout
        assert process.stdout.readline() == "holding\n", process.communicate()[1]
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Small disks of our own, full, read-only or without direct I/O: what a store on them sees, case by case."""
    folder = tmp_path_factory.mktemp("mounted")
    mounts = f"cd {folder}; mkdir small large fixed ram0 ram1; mount --bind fixed fixed; mount -o remount,bind,ro fixed"
    mounts += "; mount -t tmpfs -o size=8m none small; mount -t tmpfs -o size=64m none large"
    mounts += "; mount -t ramfs none ram0; mount -t ramfs none ram1"
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs a user namespace (unshare -rm)")
    return folder, result(start("mounted", folder, before=mounts))


def test_a_full_disk_is_told_before_the_first_step_and_the_part_that_was_reserved_is_given_back(
    mounted: tuple[Path, dict[str, Any]],
) -> None:
    """Once reserved, a write cannot find the disk full: the blocks are there."""
    folder, seen = mounted[0], mounted[1]["full"]
    text = seen["second"].pop("text")
    assert seen["second"] == {"errno": "ENOSPC", "path": f"{folder}/small", "count": 5 * MIB}
    # 8 - 5 MiB, less the pages of two locks: 2.99
    assert "rank 3 needs 5.00 MiB of scratch space; 2.99 MiB are available, " in text
    assert f"1 other runs hold 5.00 MiB ({seen['first'][0]} 5.00 MiB): free space" in text
    assert seen["given_back"] == [[], 1, 0, 0]
    assert seen["unforeseen"]["errno"] == "ENOSPC"
    assert "needs 5.00 MiB of scratch space; 2.99 MiB are available" in seen["unforeseen"]["text"]
    assert seen["unforeseen_given_back"] == [1, 0]
    assert seen["both_run"] == [1]
    assert seen["no_room_for_a_lock"]["errno"] == "ENOSPC"
    assert seen["no_room_for_a_lock"]["left"] == ["others"]
    assert seen["left"] == [[], 0]


def test_a_read_only_path_is_told(mounted: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = mounted[0], mounted[1]["read_only"]
    assert (seen["errno"], seen["path"]) == ("EROFS", f"{folder}/fixed")
    assert "making a private directory for scratch data: Read-only file system" in seen["text"]


def test_without_direct_io_transfers_are_buffered_with_one_warning(mounted: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = mounted[0], mounted[1]["buffered"]
    assert seen["equal"]
    assert seen["direct"] == [False, False]
    assert len(seen["warnings"]) == 1
    assert f"no direct I/O on {folder}/ram0, {folder}/ram1: transfers go through the page cache" in seen["warnings"][0]


def test_a_write_that_is_cut_short_goes_on_and_its_fault_says_what_and_where(tmp_path: Path) -> None:
    """The limit of 6 MiB cuts the second block of 4 MiB in half: 2 MiB are written, the rest is refused."""
    seen = result(start("too_large", tmp_path))
    assert {key: seen[key] for key in ("errno", "path", "piece", "offset", "count")} == {
        "errno": "EFBIG",
        "path": str(tmp_path),
        "piece": "a",
        "offset": 6 * MIB,
        "count": 2 * MIB,
    }
    assert (
        f"write of piece 'a', {2 * MIB} bytes at offset {6 * MIB} of the scratch file: File too large" in seen["text"]
    )
    assert seen["then"] == "piece 'a' is not on disk: it was never written, or not to the end"
    assert os.listdir(tmp_path) == []


def test_short_transfers_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real transfers, of which the system moves three pages and a bit at a time."""
    really = {"pwritev": os.pwritev, "preadv": os.preadv}
    moves: list[int] = []

    def cut(name: str, fd: int, views: list[memoryview], offset: int) -> int:
        left, some = 3 * PAGE + 100, []
        for view in views:
            some.append(view[:left])
            left -= len(some[-1])
        moves.append(really[name](fd, some, offset))
        return moves[-1]

    size = 10 * PAGE + 9
    with DiskStore(DiskConfig(paths=[str(tmp_path)], direct=False), {"a": size}) as store:
        for name in really:
            monkeypatch.setattr(os, name, partial(cut, name))
        data, into = buffer(size, seed=0), buffer(size)
        store.write("a", data).result()
        store.read("a", into).result()
        assert torch.equal(into, data)
        assert moves == [3 * PAGE + 100, 3 * PAGE + 100, 3 * PAGE + 100, 2 * PAGE] * 2


@contextmanager
def exchanged(store: DiskStore, path: str) -> Iterator[None]:
    """The store's file is another one for a while."""
    fd = store.files[0].fd
    own, other = os.dup(fd), os.open(path, os.O_RDWR)
    os.dup2(other, fd)
    yield
    os.dup2(own, fd)
    os.close(own)
    os.close(other)


@pytest.mark.parametrize(("file", "way", "code"), [
    ("/dev/full", "write", errno.ENOSPC),
    ("/proc/self/mem", "write", errno.EIO),
    ("/proc/self/mem", "read", errno.EIO),
])  # fmt: skip
def test_errors_of_the_system_carry_their_number_and_place(tmp_path: Path, file: str, way: str, code: int) -> None:
    """Nothing is mapped at address 0 of a process: its memory, as a file, really fails with EIO there."""
    with DiskStore(DiskConfig(paths=[str(tmp_path)], block_bytes=2 * PAGE), {"m 0": 3 * PAGE + 9}) as store:
        data = buffer(3 * PAGE + 9, seed=0)
        store.write("m 0", data).result()
        with exchanged(store, file), pytest.raises(DiskError) as told:
            getattr(store, way)("m 0", data).result()
        error = told.value
        assert (error.errno, error.filename, error.piece) == (code, str(tmp_path), "m 0")
        assert (error.offset, error.count) in ((0, 2 * PAGE), (2 * PAGE, 2 * PAGE))
        assert f"{way} of piece 'm 0', 8192 bytes at offset {error.offset} of the scratch file" in str(error)


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_was_cut_is_told(tmp_path: Path, direct: bool) -> None:
    with DiskStore(DiskConfig(paths=[str(tmp_path)], direct=direct), {"a": 4 * PAGE, "b": PAGE}) as store:
        data = buffer(4 * PAGE, seed=0)
        store.write("a", data).result()
        os.ftruncate(store.files[0].fd, 2 * PAGE + 100)
        with pytest.raises(DiskError, match="no page was moved: the file was cut short") as told:
            store.read("a", data).result()
        assert (told.value.errno, told.value.offset, told.value.count) == (errno.EIO, 2 * PAGE, 2 * PAGE)


def flip(fd: int, bit: int) -> None:
    """Through the page cache, as a stranger would."""
    with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


@pytest.mark.parametrize(("direct", "flips"), [(False, 1200), (True, 40)])
def test_every_flipped_bit_is_found(tmp_path: Path, direct: bool, flips: int) -> None:
    """One bit at a time, anywhere in a piece of four blocks and a tail."""
    size = 4 * PAGE + 33
    config = DiskConfig(paths=[str(tmp_path)], block_bytes=PAGE, direct=direct)
    draw, data, into = random.Random(0), buffer(size, seed=0), buffer(size)
    with DiskStore(config, {"first": 100, "v layers.0": size}) as store:
        store.write("v layers.0", data).result()
        begin = store.striping.pieces["v layers.0"][0].offset
        assert begin == PAGE
        for bit in [0, 8 * size - 1, *draw.sample(range(8 * size), flips - 2)]:
            flip(store.files[0].fd, 8 * begin + bit)
            with pytest.raises(DiskError, match="is not what was written") as told:
                store.read("v layers.0", into).result()
            flip(store.files[0].fd, 8 * begin + bit)
            block = bit // (8 * PAGE)
            error = told.value
            assert (error.errno, error.filename, error.piece) == (errno.EBADMSG, str(tmp_path), "v layers.0")
            assert (error.offset, error.count) == (begin + block * PAGE, 33 if block == 4 else PAGE)
            assert f"block {block} of piece 'v layers.0', " in str(error)
        store.read("v layers.0", into).result()
        assert torch.equal(into, data)


def test_a_torn_or_stale_block_is_found_and_only_with_checksums(tmp_path: Path) -> None:
    """Half of a block is what was written before; then all of it is."""
    for checksum in (True, False):
        config = DiskConfig(paths=[str(tmp_path)], block_bytes=4 * PAGE, direct=False, checksum=checksum)
        with DiskStore(config, {"a": 4 * PAGE}) as store:
            old, new, into = (buffer(4 * PAGE, seed=seed) for seed in (0, 1, 2))
            store.write("a", old).result()
            store.write("a", new).result()
            for count in (2 * PAGE, 4 * PAGE):
                os.pwrite(store.files[0].fd, old[:count].numpy().data, 0)
                if checksum:
                    with pytest.raises(DiskError, match="is not what was written"):
                        store.read("a", into).result()
                else:
                    store.read("a", into).result()
                    assert torch.equal(into[:count], old[:count])


def test_a_fault_on_one_path_does_not_reach_other_pieces(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    config = DiskConfig(paths=[str(tmp_path / "a"), str(tmp_path / "b")])
    with DiskStore(config, {"on a": PAGE, "on b": PAGE}) as store:
        data, into = buffer(PAGE, seed=0), buffer(PAGE)
        store.write("on b", data).result()
        with exchanged(store, "/dev/full"), pytest.raises(DiskError, match="No space left"):
            store.write("on a", data).result()
        store.read("on b", into).result()
        assert torch.equal(into, data)
        store.write("on a", data).result()  # the fault has passed
        store.read("on a", into).result()
        with exchanged(store, "/dev/full"), pytest.raises(DiskError, match="No space left"):
            store.write("on a", data).result()
        with pytest.raises(RuntimeError, match="piece 'on a' is not on disk"):
            store.read("on a", into)  # what it held before is gone, too


def test_a_killed_process_gives_its_space_back_at_once_and_its_directory_at_the_next_start(tmp_path: Path) -> None:
    with running("write_forever", tmp_path) as process:
        time.sleep(0.2)
        (folder,) = tmp_path.iterdir()
        assert [name for name, _ in holders(str(tmp_path))] == [folder.name]
        with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": 1}):
            assert folder.exists()  # it lives: nobody tidies it up
        process.kill()
        process.wait()
        assert [(file.name, file.stat().st_size < 100) for file in folder.iterdir()] == [("lock", True)]
    with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": 1}):
        assert not folder.exists()
    assert os.listdir(tmp_path) == []


def test_two_jobs_on_one_path_keep_apart_and_their_reservations_add_up(tmp_path: Path) -> None:
    config = DiskConfig(paths=[str(tmp_path)])
    with running("hold", tmp_path, 2 * MIB) as process, DiskStore(config, {"a": 3 * MIB}) as store:
        assert sorted(held for _, held in holders(str(tmp_path))) == [2 * MIB, 3 * MIB]
        data, into = buffer(3 * MIB, seed=0), buffer(3 * MIB)
        store.write("a", data).result()
        assert process.stdin
        process.stdin.write("\n")
        assert result(process) == {"read": [7]}
        store.read("a", into).result()
        assert torch.equal(into, data)
        assert [held for _, held in holders(str(tmp_path))] == [3 * MIB]
    assert os.listdir(tmp_path) == []


def test_a_directory_deleted_behind_the_stores_back_takes_nothing_with_it(tmp_path: Path) -> None:
    with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": MIB}) as store:
        data, into = buffer(MIB, seed=0), buffer(MIB)
        store.write("a", data).result()
        shutil.rmtree(next(tmp_path.iterdir()))
        store.read("a", into).result()
        assert torch.equal(into, data)
    assert os.listdir(tmp_path) == []


def test_nothing_is_left_after_processes_that_end_by_themselves_or_by_ctrl_c(tmp_path: Path) -> None:
    codes = {"return": 0, "error": 1, "wait": -signal.SIGINT}
    for how in codes:
        (tmp_path / how).mkdir()
    with ExitStack() as together:
        processes = {how: together.enter_context(running("end", tmp_path / how, how)) for how in codes}
        assert len(os.listdir(tmp_path / "wait")) == 1
        processes["wait"].send_signal(signal.SIGINT)
        for how, code in codes.items():
            processes[how].communicate(timeout=60)
            assert processes[how].returncode == code
            assert os.listdir(tmp_path / how) == [], how


def test_a_forked_child_that_ends_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    assert result(start("forked", tmp_path)) == {"inside": [["lock"]]}
    assert os.listdir(tmp_path) == []


def test_the_command_line_prints_speeds_and_tells_a_wrong_path_in_one_line(
    tmp_path: Path,
) -> None:
    run = dzero("disk-bench", "--mib=1", "--rounds=1", tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith("settings: offload.disk.block_bytes=")
    run = dzero("disk-bench", tmp_path / "no")
    assert run.returncode == 1
    assert run.stderr.startswith(f"error: {tmp_path / 'no'}: a scratch path must be a directory that exists")
