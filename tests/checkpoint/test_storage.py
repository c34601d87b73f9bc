"""What is written is what is read, whoever wrote which part; in bounded memory; durable in the right order."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool import Pool
from safetensors import safe_open
from shelves import PAGE, bits, cut, entry, mixed, raw, scattered, write, write_rank
from storage_cases import recorded

from dzero import streams
from dzero.checkpoint.box import Box, covered
from dzero.checkpoint.format import data_name
from dzero.checkpoint.io_buffers import IOBuffers
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import CheckpointStore, Directory
from dzero.checkpoint.writer import ShardWriter
from dzero.offload import memory_pool

HOUSE = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "storage_cases.py"
MIB = 1 << 20


def some_box(draw: random.Random, shape: tuple[int, ...]) -> Box:
    spans = [sorted((draw.randint(0, n), draw.randint(0, n))) for n in shape]
    return Box(tuple(low for low, _ in spans), tuple(high - low for low, high in spans))


@pytest.mark.parametrize(("ranks", "pages"), [(1, 1), (2, 3), (3, 1), (5, 4096)])
def test_any_box_is_read_bit_for_bit_from_any_ranks_parts(tmp_path: Path, ranks: int, pages: int) -> None:
    draw, tensors = random.Random(ranks), mixed()
    path = write(tmp_path, 1, scattered(draw, tensors, ranks), block_bytes=pages * PAGE)
    with Checkpoint(path) as checkpoint:
        assert set(checkpoint.names) == set(tensors)
        assert checkpoint.manifest.ranks == ranks
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            for box in [Box.whole(shape), *(some_box(draw, shape) for _ in range(12))]:
                found, want = checkpoint.read(name, box), tensor[box.slices(Box.whole(shape))]
                assert (found.dtype, found.shape) == (want.dtype, want.shape)
                assert raw(found) == raw(want), (name, box)
        boxes = [(name, some_box(draw, tuple(tensors[name].shape))) for name in draw.sample(sorted(tensors), 8)]
        for (name, box), found in zip(boxes, checkpoint.read_all(boxes), strict=True):
            assert raw(found) == raw(tensors[name][box.slices(Box.whole(tuple(tensors[name].shape)))])
        assert sum(checkpoint.verify()) == sum((path / data_name(rank)).stat().st_size for rank in range(ranks))


def test_a_rank_reads_its_own_entries_as_it_put_them(tmp_path: Path) -> None:
    own = {"local.a": bits(torch.int64, (9,), 0), "local.b": bits(torch.bfloat16, (), 1)}
    path = write(tmp_path, 1, [{name: entry(None, tensor) for name, tensor in own.items()}, {}])
    with Checkpoint(path) as checkpoint:
        assert set(checkpoint.names) == set()
        for name, found in checkpoint.read_entries(0, own).items():
            assert raw(found) == raw(own[name])


def test_every_ranks_file_opens_with_the_safetensors_library_and_holds_the_same(tmp_path: Path) -> None:
    ranks = scattered(random.Random(0), mixed(), 3)
    path = write(tmp_path, 1, ranks)
    for rank, entries in enumerate(ranks):
        with safe_open(path / data_name(rank), "pt") as file:
            assert set(file.keys()) == set(entries)
            for name, (_, want) in entries.items():
                found = file.get_tensor(name)
                assert (found.dtype, found.shape) == (want.dtype, want.shape)
                assert raw(found) == raw(want)


def test_boxes_that_are_cut_cover_what_they_were_cut_from_and_overlaps_are_found() -> None:
    """Against a mask: 400 random sets of boxes, half of them with one box twice or shifted."""
    draw = random.Random(0)
    for number in range(400):
        whole = Box.whole(tuple(draw.randint(1, 6) for _ in range(draw.randint(0, 4))))
        boxes = [box for box in cut(draw, whole, 6) if box.elems]
        if number % 2:
            again = draw.choice(boxes)
            boxes.append(some_box(draw, whole.size) if whole.size else again)
            boxes = [box for box in boxes if box.elems]
        draw.shuffle(boxes)
        count = torch.zeros(whole.size, dtype=torch.int64)
        for box in boxes:
            count[box.slices(whole)] += 1
        if int(count.max()) > 1:
            with pytest.raises(ValueError, match="two parts overlap"):
                covered(boxes)
        else:
            assert covered(boxes) == int(count.sum())


def test_a_put_out_of_turn_too_many_or_left_out_is_an_error(tmp_path: Path) -> None:
    entries = {name: entry(name, tensor) for name, tensor in mixed().items()}
    parts = {name: part for name, (part, _) in entries.items()}
    with Directory(tmp_path) as folder:
        blocks = IOBuffers(2, block_bytes=PAGE)
        wrong = pytest.raises(ValueError, match=r"t1, 0 of torch.float64, where t0, 1 of F32, is due")
        with ShardWriter(folder, 0, parts, blocks) as writer, wrong:
            writer.put("t1", entries["t1"][1])
        too_many = pytest.raises(ValueError, match="t0 is one more than was laid out")
        with ShardWriter(folder, 1, {}, blocks) as writer, too_many:
            writer.put("t0", entries["t0"][1])
        with ShardWriter(folder, 2, parts, blocks) as writer:
            writer.put("t0", entries["t0"][1])
            with pytest.raises(ValueError, match="t1 was not put"):
                writer.finish()
        assert blocks.free.qsize() == 2


def test_beside_a_gpu_touched_buffers_are_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the device of the rank, which the background thread that touches them has to choose first."""
    done: list[object] = []
    monkeypatch.setattr(streams, "set_device", lambda device: done.append(device))
    monkeypatch.setattr(memory_pool, "_page_lock", lambda memory: done.append(memory.numel()) or False)
    IOBuffers(2, block_bytes=PAGE, device=torch.device("cuda", 1)).touch()
    assert done == [torch.device("cuda", 1), memory_pool.HUGE_PAGE_BYTES]
    IOBuffers(2, block_bytes=PAGE, device=torch.device("cpu")).touch()
    assert len(done) == 3


def test_the_same_step_saved_again_sorts_behind_what_is_there(tmp_path: Path) -> None:
    shelf = CheckpointStore(tmp_path)
    for want in ("step_00000005", "step_00000005_2", "step_00000005_3"):
        assert shelf.begin(5) == want
        shelf.partial(want).rename(tmp_path / want)
    shelf.remove("step_00000005")
    assert shelf.begin(5) == "step_00000005_4"
    assert shelf.begin(4) == "step_00000004"


def test_a_put_tensor_may_change_at_once(tmp_path: Path) -> None:
    tensor = bits(torch.float32, (50_000,), 0)
    want, entries = tensor.clone(), {"a": entry("a", tensor)}
    with Directory(tmp_path) as folder:
        write_rank(folder, 0, entries)
        changing = tensor.clone()
        with ShardWriter(folder, 1, {"a": entries["a"][0]}, IOBuffers(64, block_bytes=PAGE)) as writer:
            writer.put("a", changing)
            changing.zero_()
            writer.finish()
    files = [(tmp_path / data_name(rank)).read_bytes() for rank in range(2)]
    assert files[0] == files[1]
    assert files[1][-want.nbytes :] == raw(want)


def test_a_writer_and_a_reader_hold_their_blocks_however_large_the_states_are(tmp_path: Path) -> None:
    """256 MiB in all. The writer has 2 blocks of a MiB, the reader one for each of 4 threads."""
    environment = os.environ | {"PYTHONPATH": f"{HOUSE}:{HOUSE / 'tests' / 'support'}:{CASES.parent}"}
    command = [sys.executable, str(CASES), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    assert seen["file_bytes"] == 256 * MIB + 2 * PAGE  # two of header
    assert seen["written"] <= 2 * MIB + 4 * MIB  # and the threads' stacks, and what Python allocates
    assert seen["read"] <= 4 * MIB + 4 * MIB


def test_everything_is_on_disk_before_what_names_it(pool: Pool, tmp_path: Path) -> None:
    """Two ranks save twice into a new folder, keep=1. Every call of each, in order; many alike in a row are one."""
    shelf = tmp_path / "new" / "shelf"
    ranks = pool.run(recorded, 2, shelf)

    def file(path: str, name: str) -> list[tuple[str, str]]:
        return [("sync", f"{path}/{name}.partial"), ("rename", f"{path}/{name}"), ("sync", path)]

    def own(step: str, rank: int) -> list[tuple[str, str]]:
        data = f"{shelf}/{step}.partial/rank_0000{rank}.safetensors"
        return [("write", data), ("sync", data), *file(f"{shelf}/{step}.partial", f"rank_0000{rank}.json")]

    def together(step: str) -> list[tuple[str, str]]:
        named = [("rename", f"{shelf}/{step}"), ("sync", str(shelf))]
        return file(f"{shelf}/{step}.partial", "manifest.json") + named + file(str(shelf), "latest.json")

    first, second = "step_00000001", "step_00000002"
    calls = [[(what, path) for _, what, path in each] for each in ranks]
    made = [("sync", str(tmp_path)), ("sync", f"{tmp_path}/new"), ("sync", f"{shelf}/.lock")]
    removed = [("rename", f"{shelf}/{first}.going"), ("sync", str(shelf))]
    assert calls[0] == made + own(first, 0) + together(first) + own(second, 0) + together(second) + removed
    assert calls[1] == own(first, 1) + own(second, 1)
    for step, last in ((first, len(calls[1]) // 2 - 1), (second, -1)):
        manifest = calls[0].index(("sync", f"{shelf}/{step}.partial/manifest.json.partial"))
        assert ranks[1][last][0] < ranks[0][manifest][0]  # the other rank's all, before rank 0 says that it is there
    assert CheckpointStore(shelf).names() == [second]
