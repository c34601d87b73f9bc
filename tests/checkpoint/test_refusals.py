"""What the system refuses, done really: every refusal is told with the file and what to do, and leaves no trace."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from warm_python import COLD

from dzero import CheckpointError
from dzero.checkpoint.format import data_name, index_name
from dzero.checkpoint.store import LATEST, CheckpointStore

HOUSE = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "damage_cases.py"


def case(*words: object, before: str = "", cold: bool = False) -> Any:
    """A case in a process of its own; `before`: shell commands, in a namespace where anybody may mount."""
    command = [sys.executable, str(CASES), *map(str, words)]
    if before:
        command = ["unshare", "-rm", "sh", "-c", f'set -e; {before}; exec "$@"', "sh", *command]
    environment = os.environ | {"PYTHONPATH": f"{HOUSE}:{HOUSE / 'tests' / 'support'}", **(COLD if cold else {})}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A small disk, and a folder that is read-only: what happens to saves there."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs a user namespace (unshare -rm)")
    folder = tmp_path_factory.mktemp("mounted")
    mounts = f"cd {folder}; mkdir small kept fixed; touch fixed/.lock"
    mounts += "; for disk in small kept; do mount -t tmpfs -o size=8m none $disk; done"
    mounts += "; mount --bind fixed fixed; mount -o remount,bind,ro fixed"
    return folder, case("mounted", folder, before=mounts)


def test_a_full_disk_is_told_the_part_is_given_back_and_the_checkpoint_before_stays(
    mounted: tuple[Path, dict[str, Any]],
) -> None:
    """8 MiB hold one checkpoint of 3 MiB and not a second of 6; a third of 3 is saved as if nothing had been."""
    folder, seen = mounted[0] / "small", mounted[1]["full"]
    repair = "No space left on device: free space, or point checkpoint.folder to another disk"
    assert seen["second"] == f"{folder}/step_00000002.partial/{data_name(0)}: {repair}"
    assert (seen["left"], seen["free"], seen["first"]) == ([".lock", LATEST, "step_00000001"], 0, 1.0)
    assert seen["third"] == "step_00000003"
    # Then others take the rest of the disk; then they give back two pages, which a header and a page of data take.
    assert seen["no room"] == f"{folder}/step_00000004.partial/{data_name(0)}: {repair}"
    assert seen["no room for the index"] == f"{folder}/step_00000005.partial/{index_name(0)}: {repair}"
    assert seen["latest then"] == 3.0


def test_after_a_full_disk_a_smaller_keep_makes_room_before_the_save(mounted: tuple[Path, dict[str, Any]]) -> None:
    """What would be removed after it goes first; before, the restart failed as the run had."""
    seen = mounted[1]["full"]
    assert seen["kept"] == ["step_00000001", "step_00000002"]
    assert "No space left on device" in seen["kept, no room"]
    assert seen["smaller keep"] == ["step_00000003", [".lock", LATEST, "step_00000003"]]


def test_a_read_only_folder_is_told(mounted: tuple[Path, dict[str, Any]]) -> None:
    folder, seen = mounted[0] / "fixed", mounted[1]["read_only"]
    assert seen == f"{folder}/.lock: Read-only file system: choose a checkpoint.folder that can be written"


def test_a_limit_on_the_size_of_files_is_told(tmp_path: Path) -> None:
    seen = case("too_large", tmp_path)
    assert seen["told"].endswith(
        "step_00000001.partial/rank_00000.safetensors: File too large: raise the limit on the size of files (ulimit -f)"
    )
    assert seen["left"] == [".lock"]


def test_what_this_user_may_not_read_or_write_is_told() -> None:
    """In a process that is nobody, if this one is root; pytest's own folders are root's alone."""
    with TemporaryDirectory() as made:
        tmp_path = Path(made)
        seen = case("forbidden", tmp_path)
    may_not = "Permission denied: this user may not; change the permissions, or checkpoint.folder"
    folder = tmp_path / "shelf"
    assert seen == {
        "save in a folder of others": f"{folder}/.lock: {may_not}",
        "save below it": f"{folder}/new: {may_not}",
        "read data": f"{folder}/step_00000001/{data_name(0)}: {may_not}",
        "read index": f"{folder}/step_00000001/{index_name(0)}: {may_not}",
        "read folder": f"{folder}/step_00000001: {may_not}",
        "read shelf": f"{folder}: {may_not}",
        "latest": f"{folder}/{LATEST}: {may_not}",
    }


def test_inspect_and_export_tell_in_one_line_what_this_user_may_not_read_or_write() -> None:
    with TemporaryDirectory() as made:
        folder = Path(made)
        seen = case("denied", folder, cold=True)  # this user may not read the libraries
        left = sorted(path.name for path in folder.iterdir())
    may_not = "Permission denied: this user may not; change the permissions, or checkpoint.folder"
    path, elsewhere = folder / "shelf" / "step_00000001", "Permission denied: choose another folder"
    assert seen == {
        "inspect a folder": f"error: {folder}/shelf/manifest.json: {may_not}",
        "inspect a checkpoint": f"error: {path}/manifest.json: {may_not}",
        "inspect a manifest": f"error: {path}/manifest.json: {may_not}",
        "export a checkpoint": f"error: {path}/manifest.json: {may_not}",
        "export a folder": f"error: {folder}/shelf/manifest.json: {may_not}",
        "export data": f"error: {path}/{data_name(0)}: {may_not}",
        "export to": f"error: {folder}/fixed/out.partial: {elsewhere}; nothing was exported",
        "export below": f"error: {folder}/fixed/new: {elsewhere}; nothing was exported",
    }
    assert left == ["fixed", "shelf"]


def test_another_run_that_saves_in_the_folder_is_told(tmp_path: Path) -> None:
    with CheckpointStore(tmp_path).locked():
        told = pytest.raises(CheckpointError, match="another run saves its checkpoints here: give this one a folder")
        with told, CheckpointStore(tmp_path).locked():
            pass
    with CheckpointStore(tmp_path).locked():
        pass
