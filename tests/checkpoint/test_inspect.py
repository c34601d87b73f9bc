"""`python -m dzero inspect` tells what is in a checkpoint; damage of every kind is told with the file that has it.

Nothing damaged is ever taken for whole, by whoever reads it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import written_checkpoints as by_hand
from in_process import dzero as command
from pool import Pool
from small_runs import settled, train, write_text
from typed_commands import typed
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
    "data cut by a byte": (lambda f: os.truncate(f / DATA, (f / DATA).stat().st_size - 1), DATA, "it was cut short"),
    "data longer by a byte": (lambda f: os.truncate(f / DATA, (f / DATA).stat().st_size + 1), DATA, "is another file"),
    "data missing": (lambda f: (f / DATA).unlink(), DATA, MISSING),
    "index cut in half": (lambda f: os.truncate(f / INDEX, (f / INDEX).stat().st_size // 2), INDEX, "truncated"),
    "index missing": (lambda f: (f / INDEX).unlink(), INDEX, MISSING),
    "manifest missing": (lambda f: (f / MANIFEST).unlink(), MANIFEST, MISSING),
    "a digit of the manifest": (lambda f: digit(f / MANIFEST), MANIFEST, "its checksum is .*: it was damaged"),
    "manifest empty": (lambda f: os.truncate(f / MANIFEST, 0), MANIFEST, "truncated"),
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


# What is told of it

CONFIG = {
    "zero": {"stage": 3},
    "offload": {"param": "device", "grad": "host", "master": "disk", "moments": "disk"},
    "precision": {"param": "bf16", "master": "remainder", "moments": "fp32"},
    "resume": None,
}


def checkpoint(folder: Path) -> Path:
    """Three ranks of 4, 4 and 2 rows of 5."""
    tensors = {f"{kind}.w": torch.ones(10, 5) for kind in ("master", "exp_avg", "exp_avg_sq")}
    tensors["param.frozen"] = torch.ones(10, 5).bfloat16()
    extra = {"config": CONFIG, "saved": "2026-01-02T03:04:05+00:00", "model": {"kind": "llama", "config": "{}"}}
    return by_hand.write(folder, by_hand.in_rows(tensors, 3), extra=extra)


def rows(told: str) -> list[list[str]]:
    """The cells of all tables that are printed."""
    return [re.split(r" {2,}", line.strip()) for line in told.splitlines() if line.strip()]


def test_everything_in_it_is_told(tmp_path: Path) -> None:
    """A page of header for each file; 50 elements of 3 fp32 tensors and a bf16 one: 3 * 4096 + 50 * (3 * 4 + 2) bytes.

    Of the files: 4, 4 and 2 rows of 5 elements of 14 bytes behind the header.
    """
    ended = command("inspect", checkpoint(tmp_path / "step_00000007"), "--verify")
    assert (ended.returncode, ended.stderr) == (0, "")
    told = rows(ended.stdout)
    for row in (
        ["step", "7"],
        ["held-out loss", "not evaluated"],
        ["saved", "2026-01-02T03:04:05+00:00"],
        ["run", "unknown"],
        ["ranks", "3"],
        ["model", "llama"],
        ["parameters", "100 in 2 tensors"],
        ["size", "12.7 KiB"],
        ["optimizer", "unknown"],
        ["stage", "3"],
        ["tiers", "param device, grad host, master disk, moments disk"],
        ["precision", "param bf16, master remainder, moments fp32"],
        *(["exp_avg", "fp32", "1", "50", "200 B"], ["exp_avg_sq", "fp32", "1", "50", "200 B"]),
        *(["master", "fp32", "1", "50", "200 B"], ["param", "bf16", "1", "50", "100 B"]),
        ["rank_00000.safetensors", "ok", "4", "4.27 KiB"],
        ["rank_00001.safetensors", "ok", "4", "4.27 KiB"],
        ["rank_00002.safetensors", "ok", "4", "4.14 KiB"],
        ["zero", "stage=3"],
        ["resume", "None"],
    ):
        assert row in told, ended.stdout
    assert ended.stdout.endswith("\n\nverified: all 12.7 KiB are what was written\n")


def test_what_is_damaged_is_told_file_by_file_and_ends_the_command_with_1(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step_00000007")
    flip(path / data_name(1), 8 * 4099)
    unread = command("inspect", path)
    assert (unread.returncode, unread.stdout.count("not verified")) == (0, 3)
    ended = typed("-m", "dzero", "inspect", path, "--verify", cwd=tmp_path)
    assert (ended.returncode, ended.stdout.count(" ok ")) == (1, 2)
    assert re.search(r"rank_00001.safetensors +damaged", ended.stdout)
    assert f"error: {path}/rank_00001.safetensors: block 1, " in ended.stderr  # behind the page of the header
    os.truncate(path / data_name(2), (path / data_name(2)).stat().st_size + 1)
    (path / data_name(0)).unlink()
    assert re.findall(r"rank_\d+\.safetensors: (\w+)", command("inspect", path).stderr) == ["No", "4237"]


def test_all_checkpoints_of_a_folder_are_listed(tmp_path: Path) -> None:
    for step in (7, 20, 100):
        checkpoint(tmp_path / f"step_{step:08d}")
    (tmp_path / "step_00000120.partial").mkdir()
    flip(tmp_path / "step_00000020" / MANIFEST, 160)
    flip(tmp_path / "step_00000100" / data_name(0), -1)
    ended = command("inspect", tmp_path, "--verify")
    assert ended.returncode == 1
    assert ended.stderr.count(": ") >= 2
    assert [row[:2] for row in rows(ended.stdout) if row[0].startswith("step_")] == [
        ["step_00000007", "ok"],
        ["step_00000020", "damaged"],
        ["step_00000100", "damaged"],
        ["step_00000120.partial", "unfinished"],
    ]
    assert "no checkpoint is in it" in command("inspect", tmp_path / "nowhere").stderr


def test_a_terminal_obeys_nothing_that_a_file_brought(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\u202e"
    extra = {"saved": evil, "config": {evil: {evil: evil}, "zero": evil}, "model": {"kind": [evil]}}
    path = by_hand.write(tmp_path / "ck", by_hand.in_rows({f"{evil}.w": torch.ones(3)}, 1), extra=extra)
    shown = command("inspect", path)
    assert shown.returncode == 0
    assert shown.stdout.count("owned") >= 5
    assert not {"\x1b", "\x07", "\u202e"} & {*shown.stdout}


def test_a_run_of_train_py_is_told_with_its_settings(pool: Pool, tmp_path: Path) -> None:
    text, folder = write_text(tmp_path / "words.txt"), tmp_path / "ck"
    settings = [f"checkpoint.folder={folder}", "checkpoint.every=2", "checkpoint.last=false", "zero.stage=3"]
    pool.run(train, 2, settled(text, "launch.workers=2", "offload=host", "train.steps=2", *settings), tmp_path)
    (row,) = [row for row in rows(command("inspect", folder, "--verify").stdout) if row[0].startswith("step_")]
    assert row[:5] == ["step_00000002", "ok", "latest", "2", "2"]
    assert re.fullmatch("[0-9a-f]{8}", row[7])
    told = rows(command("inspect", folder / "step_00000002").stdout)
    tiers = ["tiers", "param device, grad host, master host, moments host"]
    assert all(each in told for each in (["model", "llama"], ["optimizer", "adamw"], ["stage", "3"], tiers))
    assert {row[0] for row in told if row[-1].endswith("B")} >= {"master", "exp_avg", "exp_avg_sq", "of a rank"}
    assert any("hidden_size=32" in row[1] for row in told if row[0] == "model" and len(row) > 1)
