"""Damage of every kind is told with the file that has it; nothing damaged is ever taken for whole."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import written_checkpoints as by_hand
from in_process import dzero as command
from written_checkpoints import LATEST, MANIFEST, PAGE, data_name, flip, index_name, raw

from dzero import CheckpointError, DcpReader

STEP = "step_00000001"


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """With one checkpoint of two ranks, all kinds of tensors."""
    by_hand.write(tmp_path / "shelf" / STEP, by_hand.scattered(random.Random(0), by_hand.mixed(), 2), step=1)
    by_hand.point(tmp_path / "shelf", STEP)
    return tmp_path / "shelf"


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_every_flipped_bit_of_every_file_is_found_and_its_file_named(shelf: Path, count: int) -> None:
    """`count` bits of each of six files, one at a time: the first and the last, the others anywhere in it."""
    draw, files = random.Random(0), sorted(path for path in shelf.rglob("*") if path.is_file())
    assert len(files) == 6
    for file in files:
        bits = 8 * file.stat().st_size
        for bit in [0, bits - 1, *draw.sample(range(bits), count - 2)]:
            flip(file, bit)
            told = command("inspect", shelf, "--verify")
            assert told.returncode == 1, (file, bit)
            assert told.stderr.startswith(f"error: {file}: "), (file, bit)
            flip(file, bit)
    assert command("inspect", shelf, "--verify").returncode == 0


def test_a_flipped_bit_is_found_by_whoever_reads_its_block_and_by_nobody_else(shelf: Path) -> None:
    """Data only: a read that does not touch the damaged block gives what was written."""
    draw, folder, tensors = random.Random(1), shelf / STEP, by_hand.mixed()
    for number in range(24):
        index, path = by_hand.body_of(folder / index_name(number % 2)), folder / data_name(number % 2)
        byte = draw.randrange(index["file_bytes"])
        block, damaged = byte // PAGE, set()
        for part in index["parts"].values():
            low, high = index["data_start"] + part["start"], index["data_start"] + part["end"]
            if low < high and low // PAGE <= block <= (high - 1) // PAGE:
                damaged.add(part["of"])
        flip(path, 8 * byte)
        for name, tensor in tensors.items():
            if name in damaged:
                with pytest.raises(CheckpointError, match=f"block {block}, .* is not what was written"):
                    by_hand.read(DcpReader(folder), name)
            else:
                assert raw(by_hand.read(DcpReader(folder), name)[name]) == raw(tensor)
        flip(path, 8 * byte)


Change = Callable[[Path], object]


def cut(path: Path, count: int) -> None:
    os.truncate(path, count)


def swap(one: Path, other: Path) -> None:
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)


def digit(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":2'))


def from_another(folder: Path, name: str) -> None:
    """A file of a checkpoint that is whole, too: of other values, cut in the same way."""
    tensors = {name: by_hand.bits(each.dtype, tuple(each.shape), 9) for name, each in by_hand.mixed().items()}
    other = folder.parent.parent / "other"
    by_hand.write(other, by_hand.scattered(random.Random(0), tensors, 2), step=1)
    shutil.copy(other / name, folder / name)


DATA, INDEX = data_name(1), index_name(1)
MISSING = "No such file or directory: it is missing"
DAMAGE: dict[str, tuple[Change, str, str]] = {
    "data cut by a byte": (lambda f: cut(f / DATA, (f / DATA).stat().st_size - 1), DATA, "it was cut short"),
    "data cut to nothing": (lambda f: cut(f / DATA, 0), DATA, "0 bytes, its index says .*: it was cut short"),
    "data longer by a byte": (lambda f: cut(f / DATA, (f / DATA).stat().st_size + 1), DATA, "is another file"),
    "data missing": (lambda f: (f / DATA).unlink(), DATA, MISSING),
    "index cut in half": (lambda f: cut(f / INDEX, (f / INDEX).stat().st_size // 2), INDEX, "truncated"),
    "index empty": (lambda f: cut(f / INDEX, 0), INDEX, "truncated"),
    "index missing": (lambda f: (f / INDEX).unlink(), INDEX, MISSING),
    "manifest missing": (lambda f: (f / MANIFEST).unlink(), MANIFEST, MISSING),
    "a digit of the manifest": (lambda f: digit(f / MANIFEST), MANIFEST, "its checksum is .*: it was damaged"),
    "manifest empty": (lambda f: cut(f / MANIFEST, 0), MANIFEST, "truncated"),
    "folder missing": (shutil.rmtree, "", MISSING),
    "indexes exchanged": (lambda f: swap(f / index_name(0), f / INDEX), index_name(0), "it is of another checkpoint"),
    "index of another": (lambda f: from_another(f, INDEX), INDEX, "it is of another checkpoint"),
    "manifest of another": (lambda f: from_another(f, MANIFEST), index_name(0), "it is of another checkpoint"),
    "data of another": (lambda f: from_another(f, DATA), DATA, "is not what was written"),
    "data exchanged": (lambda f: swap(f / data_name(0), f / DATA), data_name(0), "its index says"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told_with_its_file_and_what_to_do(shelf: Path, kind: str) -> None:
    damage, name, text = DAMAGE[kind]
    damage(shelf / STEP)
    with pytest.raises(CheckpointError, match=text) as told:
        by_hand.verified(shelf)
    assert told.value.path == str(shelf / STEP / name if name else shelf / STEP)
    assert command("inspect", shelf / STEP, "--verify").returncode == 1


def test_rank_files_of_one_size_that_are_exchanged_are_told(tmp_path: Path) -> None:
    """Neither size nor name tells them apart; their checksums do. Headers agree, so it is the block behind them."""
    path = by_hand.write(tmp_path / STEP, by_hand.in_rows({"a": torch.arange(10_000.0)}, 2))
    assert len({(path / data_name(rank)).stat().st_size for rank in range(2)}) == 1
    swap(path / data_name(0), path / data_name(1))
    with pytest.raises(CheckpointError, match=r"block 1, .* is not what was written"):
        by_hand.verified(path)


def test_parts_that_leave_a_hole_or_lie_twice_do_not_open(tmp_path: Path) -> None:
    first, second = by_hand.scattered(random.Random(0), by_hand.mixed(), 2)
    name, part = next((name, each) for name, each in first.items() if each.values.numel())
    without = {each: found for each, found in first.items() if each != name}
    for ranks, text in (([without, second], "elements are there"), ([first, {**second, "again": part}], "overlap")):
        path = by_hand.write(tmp_path / text, ranks)
        with pytest.raises(CheckpointError, match=f"{part.of}: .* {text}") as told:
            DcpReader(path)
        assert told.value.path == str(path / MANIFEST)


def test_the_pointer_of_a_folder_is_what_is_read(shelf: Path) -> None:
    by_hand.write(shelf / "step_00000002", by_hand.in_rows({"a": torch.ones(3)}, 1), step=2)
    assert DcpReader(shelf).path == shelf / STEP
    by_hand.point(shelf, "step_00000002")
    assert DcpReader(shelf).path == shelf / "step_00000002"
    flip(shelf / LATEST, 100)
    with pytest.raises(CheckpointError, match=LATEST):
        DcpReader(shelf)
