"""What the system refuses, done really: every refusal is told with the file and what to do, and leaves no trace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typed_commands import typed
from written_checkpoints import LATEST, data_name, index_name

HOUSE = Path(__file__).parents[2]
CASES = Path(__file__).parent / "refusal_cases.py"
PATH = {"PYTHONPATH": f"{HOUSE}:{HOUSE / 'tests' / 'support'}"}
MIB = 1 << 20


def case(name: str, folder: Path) -> Any:
    """A case in a process of its own."""
    command = [sys.executable, str(CASES), name, str(folder)]
    run = subprocess.run(command, env=os.environ | PATH, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Small disks, and a folder that is read-only: what happens to saves there; paths are below theirs."""
    folder = tmp_path_factory.mktemp("mounted")
    seen = case("mounted", folder)
    if "not permitted" in seen:
        pytest.skip(f"mounting a small file system needs a user namespace: {seen['not permitted']}")
    found: dict[str, Any] = json.loads(json.dumps(seen).replace(f"{folder}/", ""))
    return found


def test_a_full_disk_is_told_the_part_is_given_back_and_the_checkpoint_before_stays(mounted: dict[str, Any]) -> None:
    """8 MiB hold one checkpoint of 3 MiB and not a second of 6; a third of 3 is saved as if nothing had been."""
    repair = "No space left on device: free space, or point checkpoint.folder to another disk"
    assert mounted["second"] == f"small/step_00000002.partial/{data_name(0)}: {repair}"
    assert (mounted["left"], mounted["given back"]) == ([".lock", LATEST, "step_00000001"], 0)
    assert mounted["third"] == "step_00000003"
    # Then others take the rest of the disk; then they give back two pages, which a header and a page of data take.
    assert mounted["no room"] == f"small/step_00000004.partial/{data_name(0)}: {repair}"
    assert mounted["no room for the index"] == f"small/step_00000005.partial/{index_name(0)}: {repair}"
    assert mounted["latest then"] == 3.0


def test_after_a_full_disk_a_smaller_keep_makes_room_before_the_save(mounted: dict[str, Any]) -> None:
    """What would be removed after it goes first; before, the restart failed as the run had."""
    assert mounted["kept"] == ["step_00000001", "step_00000002"]
    assert "No space left on device" in mounted["kept, no room"]
    assert mounted["the best, no room"] == [".lock", LATEST, *mounted["kept"]]
    assert mounted["smaller keep"] == ["step_00000003", [".lock", LATEST, "step_00000003"]]


def test_a_read_only_folder_is_told(mounted: dict[str, Any]) -> None:
    what = "Read-only file system: choose a checkpoint.folder that can be written"
    assert mounted["read_only"] == f"fixed/.lock: {what}"


def test_an_export_that_a_disk_cannot_hold_is_told_before_anything_is_written(mounted: dict[str, Any]) -> None:
    """12 MiB, of two embeddings, on a disk of 8, of which a checkpoint takes 3."""
    told, left = mounted["export"]
    assert told.startswith("error: kept/out: 12.0 MiB to write, ")
    assert told.endswith(" free: free space, or choose another disk")
    assert left == [".lock", LATEST, "step_00000003"]


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    seen: dict[str, Any] = case("limited", tmp_path_factory.mktemp("limited") / "shelf")
    return seen


def test_a_save_and_its_verification_hold_their_blocks_however_large_the_states_are(limited: dict[str, Any]) -> None:
    """64 MiB, of which a save holds a MiB of staging, and 4 threads that verify have half a MiB each.

    The states themselves are there before the measurement but for the copy that is made of them: `save` fills its
    tensor anew. What Python and threads allocate beside is less than half of the states.
    """
    states = 64 * MIB
    assert limited["saved"] <= states + states // 2
    assert limited["verified"] <= states // 2


def test_an_export_takes_less_memory_than_one_tensor(limited: dict[str, Any]) -> None:
    """Of two embeddings of 64 MiB: blocks of a MiB that are read, and 4 MiB of a tensor in a few forms."""
    assert limited["exported"] < 64 * MIB
    assert limited["bytes exported"] > 2 * 64 * MIB


def test_a_limit_on_the_size_of_files_is_told(limited: dict[str, Any]) -> None:
    what = "File too large: raise the limit on the size of files (ulimit -f)"
    assert limited["too large"].endswith(f"step_00000003.partial/{data_name(0)}: {what}")
    assert limited["left"] == [".lock", LATEST, "step_00000001", "step_00000002"]


def test_another_run_that_saves_in_the_folder_is_told(limited: dict[str, Any]) -> None:
    assert "another run saves its checkpoints here: give this one a folder" in limited["another run"]


def test_what_this_user_may_not_read_or_write_is_told_in_one_line(tmp_path: Path) -> None:
    ended = typed(CASES, "forbidden", tmp_path, cwd=tmp_path, env=PATH)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == {"wrong": [], "left": ["fixed", "shelf"]}
