"""`python -m dzero inspect`: what is in a checkpoint, and whether it is what was written."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import by_hand
import pytest
import torch
from in_process import dzero
from pool import Pool
from small_runs import settled, train, write_text

from dzero import CheckpointError
from dzero.checkpoint.inspect import inspect
from dzero.utils.terminal import plain

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
    return by_hand.write(folder, tensors, ranks=3, extra=extra)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_everything_in_it_is_told(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step_00000007")
    # A page of header for each file; 50 elements of 3 fp32 tensors and a bf16 one: 3 * 4096 + 50 * (3 * 4 + 2) bytes.
    summary, contents, files, settings = inspect(path, verify=True)[0]
    assert dict(summary.rows) == {
        "step": "7",
        "held-out loss": "not evaluated",
        "saved": "2026-01-02T03:04:05+00:00",
        "run": "unknown",
        "ranks": "3",
        "model": "llama",
        "parameters": "100 in 2 tensors",
        "size": "12.7 KiB",
        "optimizer": "unknown",
        "stage": "3",
        "tiers": "param device, grad host, master disk, moments disk",
        "precision": "param bf16, master remainder, moments fp32",
    }
    assert contents.rows == (
        ("exp_avg", "fp32", "1", "50", "200 B"),
        ("exp_avg_sq", "fp32", "1", "50", "200 B"),
        ("master", "fp32", "1", "50", "200 B"),
        ("param", "bf16", "1", "50", "100 B"),
    )
    # 4, 4 and 2 rows of 5 elements of 14 bytes behind the header.
    assert files.rows == (
        ("rank_00000.safetensors", "ok", "4", "4.27 KiB"),
        ("rank_00001.safetensors", "ok", "4", "4.27 KiB"),
        ("rank_00002.safetensors", "ok", "4", "4.14 KiB"),
    )
    assert ("zero", "stage=3") in settings.rows
    assert ("resume", "None") in settings.rows


def test_what_is_damaged_is_named_and_ends_the_command_with_1(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "step_00000007")
    sound = dzero("inspect", path, "--verify")
    assert (sound.returncode, sound.stderr) == (0, "")
    assert sound.stdout == (plain(inspect(path, verify=True)[0]) + "\n\nverified: all 12.7 KiB are what was written\n")
    flip(path / "rank_00001.safetensors", 4099)
    unread = dzero("inspect", path)
    assert unread.returncode == 0
    assert unread.stdout.count("not verified") == 3
    line = [sys.executable, "-m", "dzero", "inspect", str(path), "--verify"]
    ended = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1
    assert re.search(r"rank_00001.safetensors +damaged", ended.stdout)
    assert ended.stdout.count(" ok ") == 2
    assert f"error: {path}/rank_00001.safetensors: block 0, " in ended.stderr
    with open(path / "rank_00002.safetensors", "ab") as file:
        file.write(b"x")
    (path / "rank_00000.safetensors").unlink()
    _, wrong = inspect(path, verify=False)
    assert [re.search(r"rank_\d+\.safetensors: (\w+)", each)[1] for each in wrong] == ["No", "4237"]  # type: ignore[index]
    flip(path / "rank_00002.json", 20)
    broken = dzero("inspect", path)
    assert (broken.returncode, broken.stdout) == (1, "")
    assert re.match(r"error: .*rank_00002.json: its checksum is", broken.stderr)


def test_all_checkpoints_of_a_folder_are_listed(tmp_path: Path) -> None:
    for step in (7, 20, 100):
        checkpoint(tmp_path / f"step_{step:08d}")
    (tmp_path / "step_00000120.partial").mkdir()
    flip(tmp_path / "step_00000020" / "manifest.json", 20)
    flip(tmp_path / "step_00000100" / "rank_00000.safetensors", -1)
    (table,), wrong = inspect(tmp_path, verify=True)
    assert [row[:2] for row in table.rows] == [
        ("step_00000007", "ok"),
        ("step_00000020", "damaged"),
        ("step_00000100", "damaged"),
        ("step_00000120.partial", "unfinished"),
    ]
    assert len(wrong) == 2
    assert dzero("inspect", tmp_path, "--verify").returncode == 1
    with pytest.raises(CheckpointError, match="no checkpoint is in it"):
        inspect(tmp_path / "nowhere", verify=False)


def test_a_terminal_obeys_nothing_that_a_file_brought(tmp_path: Path) -> None:
    evil = "\x1b]0;owned\x07\u202e"
    tensors = {f"{evil}.w": torch.ones(3)}
    extra = {"saved": evil, "config": {evil: {evil: evil}, "zero": evil}, "model": {"kind": [evil]}}
    path = by_hand.write(tmp_path / "ck", tensors, extra=extra)
    shown = dzero("inspect", path)
    assert shown.returncode == 0
    assert shown.stdout.count("owned") >= 5
    assert not {"\x1b", "\x07", "\u202e"} & {*shown.stdout}


def test_a_run_of_train_py_is_told_with_its_settings(pool: Pool, tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.txt")
    folder = tmp_path / "ck"
    settings = [f"checkpoint.folder={folder}", "checkpoint.every=2", "checkpoint.last=false", "zero.stage=3"]
    pool.run(train, 2, settled(text, "launch.workers=2", "offload=host", *settings), tmp_path, timeout_s=300.0)
    (shelf,), _ = inspect(folder, verify=True)
    assert [row[:5] for row in shelf.rows] == [("step_00000002", "ok", "latest", "2", "2")]
    assert shelf.header[7] == "run"
    assert re.fullmatch("[0-9a-f]{8}", shelf.rows[0][7])
    summary, contents, files, told = inspect(folder / "step_00000002", verify=True)[0]
    rows = dict(summary.rows)
    assert (rows["model"], rows["optimizer"], rows["stage"]) == ("llama", "adamw", "3")
    assert rows["tiers"] == "param device, grad host, master host, moments host"
    assert {row[0] for row in contents.rows} == {"master", "exp_avg", "exp_avg_sq", "of a rank"}
    assert [row[1] for row in files.rows] == ["ok", "ok"]
    assert "hidden_size=32" in dict(told.rows)["model"]
