"""`python -m dzero inspect`: what is in a checkpoint, and whether it is what was written."""

from __future__ import annotations

import os
import re
from pathlib import Path

import torch
import written_checkpoints as by_hand
from in_process import dzero as command
from pool import Pool
from small_runs import settled, train, write_text
from typed_commands import typed
from written_checkpoints import MANIFEST, data_name, flip, index_name

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


def test_what_is_damaged_is_named_and_ends_the_command_with_1(tmp_path: Path) -> None:
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
    flip(path / index_name(2), 160)
    broken = command("inspect", path)
    assert (broken.returncode, broken.stdout) == (1, "")
    assert re.match(r"error: .*rank_00002.json: its checksum is", broken.stderr)


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
