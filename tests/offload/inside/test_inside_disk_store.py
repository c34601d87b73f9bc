"""The scratch store: what is read is what was written, in its own bytes only; every fault and misuse is told, or leaves
no trace. Faults are really made: small and read-only file systems, limits, foreign writes, kills."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dzero import DiskConfig, DiskError
from dzero.offload import scratch_dir
from dzero.offload.direct_io import Direction
from dzero.offload.disk import DiskStore
from dzero.offload.disk_speed import DiskSpeed, chosen
from dzero.offload.disk_transfer import PieceTransfer
from dzero.offload.memory_pool import HostMemoryPool
from dzero.offload.scratch_dir import holders

CASES = Path(__file__).with_name("disk_cases.py")
ROOT = Path(__file__).parents[3]
PAGE, MIB = 4096, 1 << 20
BLOCK = 4 * PAGE
GUARD = 0xA5


class Buffers:
    """Aligned buffers that end at their last byte; `untouched` says whether anybody wrote behind one."""

    def __init__(self) -> None:
        self._behind: list[torch.Tensor] = []

    def take(self, count: int, seed: int | None = None) -> torch.Tensor:
        """uint8 [count], random bytes or GUARD."""
        whole = HostMemoryPool(count + 2 * PAGE).lease(count + PAGE, "buffer").data.fill_(GUARD)
        self._behind.append(whole[count:])
        if seed is not None:
            whole[:count] = torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed))
        return whole[:count]

    def untouched(self) -> bool:
        return all(bool((behind == GUARD).all()) for behind in self._behind)


def paths(folder: Path, count: int) -> list[str]:
    made = [folder / f"disk{index}" for index in range(count)]
    for path in made:
        path.mkdir()
    return list(map(str, made))


def buffer(count: int, seed: int | None = None) -> torch.Tensor:
    return Buffers().take(count, seed)


SIZES = {"empty": 0, "one": 1, "page_less": PAGE - 1, "page": PAGE, "page_more": PAGE + 1}
SIZES |= {"block": BLOCK, "blocks": 3 * BLOCK, "blocks_and_tail": 5 * BLOCK + 17}


@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_is_what_was_written_last(tmp_path: Path, seed: int) -> None:
    """Sizes at the edges of pages and blocks, and random ones; random paths, weights, threads; pieces rewritten in
    random order, many under way at a time. Nothing beyond a buffer is touched."""
    draw = random.Random(seed)
    places = paths(tmp_path, draw.randint(1, 4))
    weights = [draw.uniform(0.3, 3) for _ in places]
    config = DiskConfig(
        paths=places,
        weights=weights,
        block_bytes=PAGE * draw.choice([1, 2, 5, 64]),
        threads=draw.randint(1, 6),
        direct=draw.random() < 0.7,
    )
    sizes = SIZES | {f"p{index}": draw.randint(0, 30 * PAGE) for index in range(8)}
    buffers = Buffers()
    into = {name: buffers.take(size) for name, size in sizes.items()}
    data = {name: buffers.take(size) for name, size in sizes.items()}
    with DiskStore(config, sizes) as store:
        for turn in range(3):
            names = sorted(sizes) if turn == 0 else draw.sample(sorted(sizes), 5)
            for name in names:
                data[name].copy_(torch.from_numpy(np.frombuffer(draw.randbytes(sizes[name]), np.uint8).copy()))
            for future in [store.write(name, data[name]) for name in names]:
                future.result()
            for future in [store.read(name, into[name]) for name in sizes]:
                future.result()
            assert all(torch.equal(into[name], data[name]) for name in sizes)
    assert buffers.untouched()


@pytest.mark.parametrize(("count", "sizes"), [(1, {}), (3, SIZES)], ids=["from nothing", "behind others"])
def test_a_store_that_grows_keeps_what_it_has(tmp_path: Path, count: int, sizes: dict[str, int]) -> None:
    """Pieces are added one by one, while those before them are being read."""
    config, buffers = DiskConfig(paths=paths(tmp_path, count), block_bytes=BLOCK), Buffers()
    with DiskStore(config, sizes) as store:
        written = {name: buffers.take(size, seed=size) for name, size in sizes.items()}
        for name, data in written.items():
            store.write(name, data).result()
        for number, size in enumerate((3, 2 * BLOCK, 0, 4 * BLOCK + 9, PAGE)):
            read = {name: buffers.take(size_) for name, size_ in store.sizes.items()}
            reading = [store.read(name, data) for name, data in read.items()]
            store.add(f"more {number}", size)
            for future in reading:
                future.result()
            assert all(torch.equal(read[name], written[name]) for name in read)
            assert [os.fstat(file.fd).st_size for file in store.files] == list(store.striping.file_bytes)
            assert all(os.fstat(file.fd).st_blocks * 512 >= os.fstat(file.fd).st_size for file in store.files)
            written[f"more {number}"] = buffers.take(size, seed=100 + number)
            store.write(f"more {number}", written[f"more {number}"]).result()
        assert store.striping == DiskStore(config, store.sizes).striping
        assert buffers.untouched()


def test_a_store_without_room_for_more_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(DiskConfig(paths=paths(tmp_path, 2), block_bytes=PAGE), {"a": 4 * PAGE}, rank=2) as store:
        data = buffer(4 * PAGE, seed=1)
        store.write("a", data).result()
        with monkeypatch.context() as patched:
            patched.setattr(scratch_dir, "_available", lambda parent: 3 * PAGE)
            with pytest.raises(DiskError, match=r"rank 2 needs 16\.0 KiB more of scratch space; 12\.0 KiB are") as told:
                store.add("b", 8 * PAGE)
            assert (told.value.errno, told.value.filename) == (errno.ENOSPC, store.files[0].path)
            assert (list(store.sizes), store.striping.file_bytes) == (["a"], (2 * PAGE, 2 * PAGE))
        store.add("b", 8 * PAGE)
        into = buffer(4 * PAGE)
        store.read("a", into).result()
        assert torch.equal(into, data)


def test_direct_io_is_really_on_where_the_file_system_has_it(tmp_path: Path) -> None:
    probe = os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.fcntl(probe, fcntl.F_SETFL, os.O_DIRECT)
    except OSError:
        pytest.skip("no direct I/O where temporary files are")
    finally:
        os.close(probe)
    with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": 1}) as store:
        assert fcntl.fcntl(store.files[0].fd, fcntl.F_GETFL) & os.O_DIRECT
    with DiskStore(DiskConfig(paths=[str(tmp_path)]), {}) as store:
        store.add("a", 1)
        assert fcntl.fcntl(store.files[0].fd, fcntl.F_GETFL) & os.O_DIRECT
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # asked for, not fallen back to
        with DiskStore(DiskConfig(paths=[str(tmp_path)], direct=False), {"a": 1}) as store:
            assert not fcntl.fcntl(store.files[0].fd, fcntl.F_GETFL) & os.O_DIRECT


def test_pages_moved_are_counted_exactly_and_seconds_do_not_overlap(tmp_path: Path) -> None:
    places = paths(tmp_path, 2)
    with DiskStore(DiskConfig(paths=places, weights=[3, 1], block_bytes=BLOCK), {"a": 7 * BLOCK + 5}) as store:
        data, start = buffer(7 * BLOCK + 5, seed=1), time.perf_counter()
        for _ in range(5):
            store.write("a", data).result()
        store.read("a", data).result()
        passed_s, use = time.perf_counter() - start, store.use()
    # 3 : 1, so of 8 blocks path 0 has 6 and path 1 has 2; the last, of 5 bytes, takes a page and is path 0's.
    pages = [5 * BLOCK + PAGE, 2 * BLOCK]
    assert [use[path][Direction.WRITE].moved_bytes for path in places] == [5 * count for count in pages]
    assert [use[path][Direction.READ].moved_bytes for path in places] == pages
    for path in places:
        assert 0 < use[path][Direction.WRITE].busy_s + use[path][Direction.READ].busy_s <= passed_s


def test_settings_without_sense_are_refused(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    twice = [str(tmp_path), str(tmp_path / "sub" / "..")]
    wrong: list[tuple[str, dict[str, Any]]] = [
        *(("name at least one directory", {"paths": given}) for given in ([], [""])),
        *(
            (f"block_bytes={count}: must be a multiple of 4096 from 4096 to", {"paths": ["x"], "block_bytes": count})
            for count in (0, 4095, 5000, 2 << 30)
        ),
        *((f"threads={count}: must be 1 to 64", {"paths": ["x"], "threads": count}) for count in (0, 65)),
        (r"weights=\[1\]: give one for each of the 2 paths", {"paths": twice, "weights": [1]}),
        ("are one directory: name one per disk", {"paths": twice}),
    ]
    for words, settings in wrong:
        with pytest.raises(ValueError, match=words):
            DiskStore(DiskConfig(**settings), {"a": 1})
    assert os.listdir(tmp_path) == ["sub"]


def test_a_piece_ends_only_when_no_block_is_left_to_touch_its_buffer() -> None:
    transfer, done = PieceTransfer(3), []

    def fail() -> None:
        raise OSError("first")

    transfer.run(fail)
    assert not transfer.future.done()
    transfer.run(lambda: done.append("started in vain"))
    assert not transfer.future.done()
    transfer.run(lambda: done.append("started in vain"))
    with pytest.raises(OSError, match="first"):
        transfer.future.result(timeout=0)
    assert done == []
    assert PieceTransfer(0).future.done()


def test_the_smallest_settings_that_are_nearly_best_are_chosen() -> None:
    def row(threads: int, *rates: float) -> tuple[DiskConfig, list[DiskSpeed]]:
        return DiskConfig(paths=["a", "b"], threads=threads), [DiskSpeed("ab"[i], r, r) for i, r in enumerate(rates)]

    shares, settings = chosen([row(1, 60e9, 30e9), row(4, 73.5e9, 24.5e9), row(8, 70e9, 30e9)])
    assert shares == "shares by path: a 0.75, b 0.25"
    said = "offload.disk.block_bytes=16777216 offload.disk.threads=4 'offload.disk.weights=[73.50,24.50]'"
    assert settings == f"settings: {said}"


def start(*words: object, before: str = "") -> subprocess.Popen[str]:
    """A case in a process of its own; `before`: shell commands, in a namespace where anybody may mount."""
    command = [sys.executable, str(CASES), *map(str, words)]
    if before:
        command = ["unshare", "-rm", "sh", "-c", f'set -e; {before}; exec "$@"', "sh", *command]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)}, **pipes)


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
    """Small disks of our own, full or without direct I/O: what a store on them sees, case by case."""
    folder = tmp_path_factory.mktemp("mounted")
    mounts = f"cd {folder}; mkdir small large ram0 ram1; mount -t tmpfs -o size=8m none small"
    mounts += "; mount -t tmpfs -o size=64m none large; mount -t ramfs none ram0; mount -t ramfs none ram1"
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
    assert seen["no_room_for_a_lock"]["errno"] == "ENOSPC"
    assert seen["no_room_for_a_lock"]["left"] == ["others"]
    assert seen["left"] == [[], 0]


def test_without_direct_io_transfers_are_buffered_with_one_warning(mounted: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = mounted[0], mounted[1]["buffered"]
    assert seen["equal"]
    assert seen["direct"] == [False, False]
    assert len(seen["warnings"]) == 1
    assert f"no direct I/O on {folder}/ram0, {folder}/ram1: transfers go through the page cache" in seen["warnings"][0]


def test_short_transfers_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real transfers, of which the system moves three pages and a bit at a time, and in the end refuses the third."""
    really = {"pwritev": os.pwritev, "preadv": os.preadv}
    part, moves = 3 * PAGE + 100, list[int]()

    def cut(name: str, fd: int, views: list[memoryview], offset: int) -> int:
        left, some = part, []
        for view in views:
            some.append(view[:left])
            left -= len(some[-1])
        if len(moves) == 10:
            raise OSError(errno.EFBIG, "File too large")
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
        assert moves == [part, part, part, 2 * PAGE] * 2
        says = f"write of piece 'a', {5 * PAGE} bytes at offset"
        with pytest.raises(DiskError, match=says) as told:
            store.write("a", data).result()
        assert (told.value.errno, told.value.offset) == (errno.EFBIG, 6 * PAGE)  # whole pages count
        with pytest.raises(RuntimeError, match="piece 'a' is not on disk: it was never written, or not to the end"):
            store.read("a", into)


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
def test_errors_of_the_system_carry_their_number_and_place_and_reach_no_other_piece(
    tmp_path: Path, file: str, way: str, code: int
) -> None:
    """Nothing is mapped at address 0 of a process: its memory, as a file, really fails with EIO there."""
    sizes = {"m 0": 3 * PAGE + 9, "other": PAGE}
    with DiskStore(DiskConfig(paths=[str(tmp_path)], block_bytes=2 * PAGE), sizes) as store:
        data, other, into = buffer(3 * PAGE + 9, seed=0), buffer(PAGE, seed=1), buffer(PAGE)
        store.write("m 0", data).result()
        store.write("other", other).result()
        with exchanged(store, file), pytest.raises(DiskError) as told:
            getattr(store, way)("m 0", data).result()
        error = told.value
        assert (error.errno, error.filename, error.piece) == (code, str(tmp_path), "m 0")
        assert (error.offset, error.count) in ((0, 2 * PAGE), (2 * PAGE, 2 * PAGE))
        assert f"{way} of piece 'm 0', 8192 bytes at offset {error.offset} of the scratch file" in str(error)
        store.read("other", into).result()
        assert torch.equal(into, other)
        if way == "write":  # what it held before is gone, too
            with pytest.raises(RuntimeError, match="piece 'm 0' is not on disk"):
                store.read("m 0", data)
        store.write("m 0", data).result()  # the fault has passed
        store.read("m 0", data).result()


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


def test_a_killed_process_gives_its_space_back_at_once_and_its_directory_at_the_next_start(tmp_path: Path) -> None:
    process = start("write_forever", tmp_path)
    try:
        assert process.stdout
        assert process.stdout.readline() == "holding\n", process.communicate()[1]
        (folder,) = tmp_path.iterdir()
        assert [name for name, _ in holders(str(tmp_path))] == [folder.name]
        with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": 1}):
            assert folder.exists()  # it lives: nobody tidies it up
    finally:
        process.kill()
        process.communicate()
    assert [(file.name, file.stat().st_size < 100) for file in folder.iterdir()] == [("lock", True)]
    with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": 1}):
        assert not folder.exists()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_that_ends_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    assert result(start("forked", tmp_path)) == {"inside": [["lock"]]}
    assert os.listdir(tmp_path) == []


def test_close_waits_for_what_was_started_and_may_be_called_twice(tmp_path: Path) -> None:
    store = DiskStore(DiskConfig(paths=[str(tmp_path)], block_bytes=PAGE), {"a": 256 * PAGE})
    future = store.write("a", Buffers().take(256 * PAGE, seed=1))
    store.close()
    assert future.done()
    assert future.exception() is None
    assert os.listdir(tmp_path) == []
    store.close()
    with pytest.raises(RuntimeError, match="shutdown"):
        store.read("a", Buffers().take(256 * PAGE))


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


@pytest.mark.full("tests/launch/test_leftovers.py::test_nothing_is_left_of_a_run_that_ended")
def test_nothing_is_left_after_processes_that_end_by_themselves_or_by_ctrl_c(tmp_path: Path) -> None:
    codes = {"return": 0, "error": 1, "wait": -signal.SIGINT}
    for how in codes:
        (tmp_path / how).mkdir()
    with ExitStack() as together:
        processes = {how: together.enter_context(running("end", tmp_path / how, how)) for how in codes}
        assert len(os.listdir(tmp_path / "wait")) == 1
        processes["wait"].send_signal(signal.SIGINT)
        for how, code in codes.items():
            processes[how].communicate(timeout=120)
            assert processes[how].returncode == code
            assert os.listdir(tmp_path / how) == [], how
