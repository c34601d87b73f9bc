"""The scratch store: what is read is what was written, in its own bytes only, and every misuse is told at once."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import random
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from dzero import DiskConfig, DiskError
from dzero.offload import scratch_dir
from dzero.offload.direct_io import Direction
from dzero.offload.disk import DiskStore
from dzero.offload.disk_speed import DiskSpeed, bench, chosen, measure
from dzero.offload.disk_transfer import PieceTransfer
from dzero.offload.memory_pool import HostMemoryPool, aligned

PAGE = 4096
BLOCK = 4 * PAGE
GUARD = 0xA5


class Buffers:
    """Aligned buffers that end at their last byte; `untouched` says whether anybody wrote behind one."""

    def __init__(self, capacity_bytes: int = 4 << 20) -> None:
        self._all = HostMemoryPool(capacity_bytes).lease(capacity_bytes, "all").data.fill_(GUARD)
        self._pieces: list[tuple[int, int]] = []
        self._end = 0

    def take(self, count: int, seed: int | None = None) -> torch.Tensor:
        """uint8 [count], random bytes or GUARD."""
        start, self._end = self._end, self._end + aligned(count) + PAGE
        self._pieces.append((start, count))
        piece = self._all[start : start + count]
        if seed is not None:
            piece.copy_(torch.randint(0, 256, (count,), generator=torch.Generator().manual_seed(seed)))
        return piece

    def untouched(self) -> bool:
        used = torch.zeros_like(self._all, dtype=torch.bool)
        for start, count in self._pieces:
            used[start : start + count] = True
        return bool((self._all[~used] == GUARD).all())


def paths(folder: Path, count: int) -> list[str]:
    made = [folder / f"disk{index}" for index in range(count)]
    for path in made:
        path.mkdir()
    return list(map(str, made))


SIZES = {"empty": 0, "one": 1, "page_less": PAGE - 1, "page": PAGE, "page_more": PAGE + 1}
SIZES |= {"block": BLOCK, "blocks": 3 * BLOCK, "blocks_and_tail": 5 * BLOCK + 17}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_every_size_comes_back_and_nothing_beyond_it_is_touched(tmp_path: Path, count: int, direct: bool) -> None:
    config, buffers = DiskConfig(paths=paths(tmp_path, count), block_bytes=BLOCK, direct=direct), Buffers()
    with DiskStore(config, SIZES) as store:
        written = {name: buffers.take(size, seed=size) for name, size in SIZES.items()}
        for future in [store.write(name, data) for name, data in written.items()]:
            future.result()
        read = {name: buffers.take(size) for name, size in SIZES.items()}
        for future in [store.read(name, data) for name, data in read.items()]:
            future.result()
        for name in SIZES:
            assert torch.equal(read[name], written[name]), name
        assert buffers.untouched()


@pytest.mark.parametrize("seed", range(12))
def test_what_is_read_is_what_was_written_last(tmp_path: Path, seed: int) -> None:
    """Random sizes, paths, weights, threads; pieces rewritten in random order, many under way at a time."""
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
    sizes = {f"p{index}": draw.randint(0, 30 * PAGE) for index in range(12)}
    buffers = Buffers(16 << 20)
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


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("sizes", [{}, SIZES], ids=["from nothing", "behind others"])
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
            into = buffers.take(size)
            if size:
                with pytest.raises(RuntimeError, match=f"piece 'more {number}' is not on disk"):
                    store.read(f"more {number}", into)
            written[f"more {number}"] = buffers.take(size, seed=100 + number)
            store.write(f"more {number}", written[f"more {number}"]).result()
        assert store.striping == DiskStore(config, store.sizes).striping
        assert buffers.untouched()
        with pytest.raises(ValueError, match="piece 'more 0' is there already, of 3 bytes: add it under another name"):
            store.add("more 0", 5)


def test_a_store_without_room_for_more_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with DiskStore(DiskConfig(paths=paths(tmp_path, 2), block_bytes=PAGE), {"a": 4 * PAGE}, rank=2) as store:
        data = Buffers().take(4 * PAGE, seed=1)
        store.write("a", data).result()
        with monkeypatch.context() as patched:
            patched.setattr(scratch_dir, "_available", lambda parent: 3 * PAGE)
            with pytest.raises(DiskError, match=r"rank 2 needs 16\.0 KiB more of scratch space; 12\.0 KiB are") as told:
                store.add("b", 8 * PAGE)
            assert (told.value.errno, told.value.filename) == (errno.ENOSPC, store.files[0].path)
            assert (list(store.sizes), store.striping.file_bytes) == (["a"], (2 * PAGE, 2 * PAGE))
        store.add("b", 8 * PAGE)
        into = Buffers().take(4 * PAGE)
        store.read("a", into).result()
        assert torch.equal(into, data)


def test_a_store_of_nothing_says_where_it_will_be(tmp_path: Path) -> None:
    with DiskStore(DiskConfig(paths=paths(tmp_path, 2), weights=[3, 1]), {}) as store:
        assert f"{tmp_path}/disk0 (75%), {tmp_path}/disk1 (25%); direct I/O" in store.describe()


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


def test_space_is_reserved_in_real_blocks_before_anything_is_written(tmp_path: Path) -> None:
    places = paths(tmp_path, 2)
    with DiskStore(DiskConfig(paths=places, weights=[3, 1], block_bytes=BLOCK), {"a": 64 * BLOCK}) as store:
        found = [os.fstat(file.fd) for file in store.files]
    assert [stat.st_size for stat in found] == [48 * BLOCK, 16 * BLOCK]
    assert all(stat.st_blocks * 512 >= stat.st_size for stat in found)


def test_pages_moved_are_counted_exactly_and_seconds_do_not_overlap(tmp_path: Path) -> None:
    places = paths(tmp_path, 2)
    with DiskStore(DiskConfig(paths=places, weights=[3, 1], block_bytes=BLOCK), {"a": 7 * BLOCK + 5}) as store:
        data, start = Buffers().take(7 * BLOCK + 5, seed=1), time.perf_counter()
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


def test_a_piece_that_is_not_on_disk_cannot_be_read(tmp_path: Path) -> None:
    with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": 10, "none": 0}) as store:
        buffer = Buffers().take(10)
        with pytest.raises(RuntimeError, match="piece 'a' is not on disk: it was never written, or not to the end"):
            store.read("a", buffer)
        store.read("none", buffer[:0]).result()
        with pytest.raises(ValueError, match="no piece is called 'b'; the store has 2"):
            store.read("b", buffer)


def test_buffers_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with DiskStore(DiskConfig(paths=[str(tmp_path)]), {"a": 2 * PAGE}) as store:
        pool = Buffers().take(8 * PAGE)
        for wrong in (pool[:PAGE], pool[: 3 * PAGE], pool[: 4 * PAGE : 2], pool[: 2 * PAGE].view(torch.int8)):
            with pytest.raises(ValueError, match=r"piece 'a': the buffer is .*; give uint8 \[8192\], contiguous"):
                store.write("a", wrong)
        with pytest.raises(ValueError, match="starts 8 bytes past a multiple of 4096: lease it from a HostMemoryPool"):
            store.write("a", pool[8 : 8 + 2 * PAGE])
        store.write("a", pool[: 2 * PAGE].numpy()).result()
        fixed = pool[2 * PAGE : 4 * PAGE].numpy()
        fixed.flags.writeable = False
        store.write("a", fixed).result()
        with pytest.raises(ValueError, match="piece 'a': the buffer is read-only"):
            store.read("a", fixed)


def test_settings_without_sense_are_refused(tmp_path: Path) -> None:
    for paths_given in ([], [""]):
        with pytest.raises(ValueError, match="name at least one directory"):
            DiskConfig(paths=paths_given)
    for block_bytes in (0, 4095, 5000, 2 << 30):
        with pytest.raises(ValueError, match=f"block_bytes={block_bytes}: must be a multiple of 4096 from 4096 to"):
            DiskConfig(paths=["x"], block_bytes=block_bytes)
    for threads in (0, 65):
        with pytest.raises(ValueError, match=f"threads={threads}: must be 1 to 64"):
            DiskConfig(paths=["x"], threads=threads)
    (tmp_path / "sub").mkdir()
    twice = [str(tmp_path), str(tmp_path / "sub" / "..")]
    with pytest.raises(ValueError, match="are one directory: name one per disk"):
        DiskStore(DiskConfig(paths=twice), {"a": 1})
    with pytest.raises(ValueError, match=r"weights=\[1\]: give one for each of the 2 paths"):
        DiskConfig(paths=twice, weights=[1])
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


def test_a_store_that_is_dropped_ends_after_what_was_started(tmp_path: Path) -> None:
    store = DiskStore(DiskConfig(paths=[str(tmp_path)], block_bytes=PAGE, threads=1), {"a": 256 * PAGE})
    future = store.write("a", Buffers().take(256 * PAGE, seed=1))
    del store
    gc.collect()
    future.result(timeout=30)
    deadline = time.monotonic() + 10
    while os.listdir(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)  # the thread lets the file go just after the future ends
    assert os.listdir(tmp_path) == []


def test_speeds_are_measured_path_by_path_and_leave_nothing(tmp_path: Path) -> None:
    places = paths(tmp_path, 2)
    speeds = measure(DiskConfig(paths=places), sample_bytes=1 << 20, rounds=1)
    assert [speed.path for speed in speeds] == places
    assert all(speed.write_bytes_per_s > 0 and speed.read_bytes_per_s > 0 for speed in speeds)
    assert DiskSpeed("x", 1.0, 3.0).both_bytes_per_s == 1.5  # 2 bytes in 1 + 1/3 seconds
    lines = list(bench(places, sample_bytes=1 << 20, rounds=1))
    assert lines[0] == "1.00 MiB at a time, 18.0 MiB written to each path in all"  # 3 blocks x 3 threads x (1 + 1)
    assert len(lines) == 2 + 2 * 9 + 3
    assert lines[-1].startswith("settings: offload.disk.block_bytes=")
    assert [os.listdir(path) for path in places] == [[], []]
    with pytest.raises(ValueError, match="rounds=0, sample_bytes=1: both must be at least 1"):
        measure(DiskConfig(paths=places), sample_bytes=1, rounds=0)


def test_the_smallest_settings_that_are_nearly_best_are_chosen() -> None:
    def row(threads: int, *rates: float) -> tuple[DiskConfig, list[DiskSpeed]]:
        return DiskConfig(paths=["a", "b"], threads=threads), [DiskSpeed("ab"[i], r, r) for i, r in enumerate(rates)]

    shares, settings = chosen([row(1, 60e9, 30e9), row(4, 73.5e9, 24.5e9), row(8, 70e9, 30e9)])
    assert shares == "shares by path: a 0.75, b 0.25"
    said = "offload.disk.block_bytes=16777216 offload.disk.threads=4 'offload.disk.weights=[73.50,24.50]'"
    assert settings == f"settings: {said}"
