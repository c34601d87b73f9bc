"""Damage of every kind is told with the file that has it; nothing damaged is ever taken for whole."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from damage_cases import resumed_from_damaged_pointers
from pool import Pool
from shelves import PAGE, bits, entry, mixed, raw, scattered, write

from dzero import CheckpointError
from dzero.checkpoint.box import Box
from dzero.checkpoint.format import MANIFEST, VERSION, data_name, index_name, seal
from dzero.checkpoint.reader import Checkpoint
from dzero.checkpoint.store import LATEST, CheckpointStore


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """With one checkpoint of two ranks, all kinds of tensors."""
    write(tmp_path / "shelf", 1, scattered(random.Random(0), mixed(), 2))
    return tmp_path / "shelf"


def read_all(shelf: Path) -> None:
    """Everything that can be read, as a run would: by the pointer."""
    name = CheckpointStore(shelf).latest()
    assert name is not None
    with Checkpoint(shelf / name) as checkpoint:
        for tensor in checkpoint.names:
            checkpoint.read(tensor, Box.whole(checkpoint.part(tensor).shape))


def verify_all(shelf: Path) -> None:
    name = CheckpointStore(shelf).latest()
    assert name is not None
    with Checkpoint(shelf / name) as checkpoint:
        assert sum(checkpoint.verify()) == sum(index.file_bytes for index in checkpoint.indexes)


def flip(path: Path, bit: int) -> None:
    with path.open("r+b", buffering=0) as file:
        (byte,) = os.pread(file.fileno(), 1, bit // 8)
        os.pwrite(file.fileno(), bytes([byte ^ 1 << bit % 8]), bit // 8)


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_every_file_is_found_and_its_file_named(shelf: Path, count: int) -> None:
    """`count` bits of each of six files, one at a time: the first and the last, the others anywhere in it."""
    draw, files = random.Random(0), sorted(path for path in shelf.rglob("*") if path.is_file())
    folder = shelf / "step_00000001"
    made_of = [f(rank) for rank in (0, 1) for f in (index_name, data_name)]
    assert files == sorted([shelf / LATEST, folder / MANIFEST, *(folder / name for name in made_of)])
    read_all(shelf)
    for file in files:
        bits_of_it = 8 * file.stat().st_size
        drawn = [0, bits_of_it - 1, *draw.sample(range(bits_of_it), count - 2)]
        for bit in drawn:
            flip(file, bit)
            with pytest.raises(CheckpointError) as told:
                verify_all(shelf)
            assert told.value.path == str(file), (file, bit)
            assert str(file) in str(told.value)
            flip(file, bit)
    verify_all(shelf)


def test_a_flipped_bit_is_found_by_whoever_reads_its_block_and_by_nobody_else(shelf: Path) -> None:
    """Data only: a read that does not touch the damaged block gives what was written."""
    draw, folder, tensors = random.Random(1), shelf / "step_00000001", mixed()
    for _ in range(60):
        with Checkpoint(folder) as checkpoint:
            index = draw.choice(checkpoint.indexes)
            byte = draw.randrange(index.file_bytes)
            block, path = byte // PAGE, folder / data_name(index.rank)
            flip(path, 8 * byte)
            for name, tensor in tensors.items():
                spans = [
                    (index.data_start + part.start, index.data_start + part.end)
                    for part in index.parts.values()
                    if part.of == name and part.start < part.end
                ]
                if any(low // PAGE <= block <= (high - 1) // PAGE for low, high in spans):
                    with pytest.raises(CheckpointError, match=f"block {block}, .* is not what was written"):
                        checkpoint.read(name, Box.whole(tuple(tensor.shape)))
                else:
                    assert raw(checkpoint.read(name, Box.whole(tuple(tensor.shape)))) == raw(tensor)
            flip(path, 8 * byte)


Change = Callable[[Path], None]


def cut(path: Path, count: int) -> None:
    os.truncate(path, count)


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def digit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":2'))


def from_another(folder: Path, name: str) -> None:
    """A file of a checkpoint that is whole, too: of another step of the same run."""
    tensors = {name: bits(tensor.dtype, tuple(tensor.shape), 9) for name, tensor in mixed().items()}
    other = write(folder.parent.parent / "other", 1, scattered(random.Random(0), tensors, 2))
    shutil.copy(other / name, folder / name)


def rewritten(path: Path, **changes: Any) -> None:
    """Sealed anew: not damage, but a writer that says something else."""
    body = json.loads(path.read_bytes())["body"] | changes
    path.write_bytes(seal(body)[0])


DATA, INDEX = data_name(1), index_name(1)
DAMAGE: dict[str, tuple[Change, str, str]] = {
    "data cut by a byte": (lambda f: cut(f / DATA, (f / DATA).stat().st_size - 1), DATA, "it was cut short"),
    "data cut to nothing": (lambda f: cut(f / DATA, 0), DATA, "0 bytes, its index says .*: it was cut short"),
    "data longer by a byte": (lambda f: cut(f / DATA, (f / DATA).stat().st_size + 1), DATA, "is another file"),
    "data missing": (lambda f: (f / DATA).unlink(), DATA, "No such file or directory: it is missing"),
    "index cut in half": (lambda f: cut(f / INDEX, (f / INDEX).stat().st_size // 2), INDEX, "truncated"),
    "index empty": (lambda f: cut(f / INDEX, 0), INDEX, "truncated"),
    "index missing": (lambda f: (f / INDEX).unlink(), INDEX, "No such file or directory: it is missing"),
    "manifest missing": (lambda f: (f / MANIFEST).unlink(), MANIFEST, "No such file or directory: it is missing"),
    "manifest with a digit that changed": (
        lambda f: digit(f / MANIFEST),
        MANIFEST,
        "its checksum is .*: it was damaged",
    ),
    "manifest empty": (lambda f: cut(f / MANIFEST, 0), MANIFEST, "truncated"),
    "folder missing": (shutil.rmtree, "", "No such file or directory: it is missing"),
    "indexes exchanged": (lambda f: swap(f / index_name(0), f / INDEX), index_name(0), "it is of another checkpoint"),
    "index of another": (lambda f: from_another(f, INDEX), INDEX, "it is of another checkpoint"),
    "manifest of another": (lambda f: from_another(f, MANIFEST), index_name(0), "it is of another checkpoint"),
    "data of another": (lambda f: from_another(f, DATA), DATA, "is not what was written"),
    "data exchanged": (lambda f: swap(f / data_name(0), f / DATA), data_name(0), "its index says"),
    "version": (lambda f: rewritten(f / MANIFEST, version=VERSION + 1), MANIFEST, "install a newer one"),
    "no ranks": (lambda f: rewritten(f / MANIFEST, seals=[]), MANIFEST, "step 1 of 0 ranks"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_with_its_file_and_what_to_do(shelf: Path, kind: str) -> None:
    damage, name, text = DAMAGE[kind]
    folder = shelf / "step_00000001"
    damage(folder)
    for look in (verify_all, read_all):
        with pytest.raises(CheckpointError, match=text) as told:
            look(shelf)
        assert told.value.path == str(folder / name if name else folder)


def test_rank_files_of_one_size_that_are_exchanged_are_told(tmp_path: Path) -> None:
    """Neither size nor name tells them apart; their checksums do."""
    whole = torch.arange(10_000.0)
    path = write(tmp_path, 1, [{"a": entry("a", whole, Box((start,), (5000,)))} for start in (0, 5000)])
    assert len({(path / data_name(rank)).stat().st_size for rank in range(2)}) == 1
    swap(path / data_name(0), path / data_name(1))
    for look in (verify_all, read_all):
        with pytest.raises(CheckpointError, match=r"block 1, .* is not what was written"):  # headers agree
            look(tmp_path)


def test_parts_that_leave_a_hole_or_lie_twice_do_not_open(tmp_path: Path) -> None:
    parts = scattered(random.Random(0), mixed(), 2)
    name, (part, tensor) = next((n, each) for n, each in parts[0].items() if each[1].numel())
    without = {n: each for n, each in parts[0].items() if n != name}
    for ranks, text in (
        ([without, parts[1]], f"{part.of}: .* elements are there"),
        ([parts[0], {**parts[1], "again": (part, tensor)}], f"{part.of}: two parts overlap"),
    ):
        path = write(tmp_path, 1, ranks)
        with pytest.raises(CheckpointError, match=text) as told:
            Checkpoint(path)
        assert told.value.path == str(path / MANIFEST)


def test_a_damaged_pointer_is_told_and_resume_takes_the_newest_that_opens(pool: Pool, tmp_path: Path) -> None:
    """Two ranks; the last case has nothing left that opens, and does not start anew."""
    seen = pool.run(resumed_from_damaged_pointers, 2, tmp_path)
    pointer = tmp_path / LATEST
    for each in seen:
        assert each["whole"] == [3, []]
        for case in ("flipped", "cut", "a link", "a folder", "not a checkpoint's name"):
            step, notes = each[case]
            assert step == 3, case
            assert len(notes) == (1 if each is seen[0] else 0)  # rank 0's is the log
        step, notes = each["the newest is damaged, too"]
        assert step == 2
        text = each["nothing opens"]
        assert text.startswith(f"{tmp_path}: no checkpoint opens; move it away to start anew. {pointer}: ")
        assert each["missing"] == [3, []]
        assert each["by its name"] == [2, []]
    assert all(f"{pointer}: " in seen[0][case][1][0] for case in ("flipped", "cut", "a link", "a folder"))
    assert f"passed over: {tmp_path}/step_00000003/{MANIFEST}: " in seen[0]["the newest is damaged, too"][1][1]
