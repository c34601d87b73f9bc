"""Checkpoints that were written to harm are refused; nothing runs, hangs, is written elsewhere or takes much memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile_cases import CLAIMS, DATA, INDEX, KINDS, POINTERS, STEP, claim, honest, instead, read
from shelves import RUN

from dzero import CheckpointError
from dzero.checkpoint.format import MANIFEST, seal
from dzero.checkpoint.selection import keep
from dzero.checkpoint.store import LATEST, LOCK, CheckpointStore

HOUSE = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "hostile_cases.py"
MIB = 1 << 20
PLACES = (DATA, INDEX, MANIFEST, LATEST, STEP)
NAMES = [
    *(f"it claims {claim}" for claim in CLAIMS),
    *(f"the pointer says {pointer}" for pointer in POINTERS),
    *(f"{kind} in place of {place}" for kind in KINDS for place in PLACES),
]


def listed(folder: Path) -> dict[str, tuple[int, ...]]:
    """Everything below: its kind, size and when it was last changed."""
    found = {}
    for path in folder.rglob("*"):
        told = path.lstat()
        found[str(path)] = (told.st_mode, told.st_size, told.st_mtime_ns, told.st_nlink)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a process of its own saw of each; it has left all of them as they were."""
    root = tmp_path_factory.mktemp("hostile")
    changes: list[Callable[[Path], object]] = [
        *(lambda shelf, c=claim: c(shelf / STEP) for claim in CLAIMS.values()),
        *(lambda shelf, n=name: (shelf / LATEST).write_bytes(seal({"name": n})[0]) for name in POINTERS.values()),
        *(
            lambda shelf, m=make, p=place: instead(m, shelf / p if p in (LATEST, STEP) else shelf / STEP / p)
            for make in KINDS.values()
            for place in PLACES
        ),
    ]
    for number, change in enumerate(changes):
        (root / str(number)).mkdir()
        honest(root / str(number) / "shelf")
        change(root / str(number) / "shelf")
    shelves = [f"{number}/shelf" for number in range(len(changes))]
    before = listed(root)
    environment = os.environ | {"PYTHONPATH": f"{HOUSE}:{HOUSE / 'tests' / 'support'}"}
    command = [sys.executable, str(CASES), str(root), *shelves]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    after = {path: told for path, told in listed(root).items() if not path.startswith(f"{root}/honest")}
    assert after == before
    return dict(zip(NAMES, json.loads(run.stdout.splitlines()[-1]).values(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_refused_with_its_file_at_once_and_in_little_memory(seen: dict[str, dict[str, Any]], name: str) -> None:
    each = seen[name]
    assert each["kind"] in ("CheckpointError", "CheckpointDamaged"), each
    assert each["path"].startswith(each["shelf"]), each
    assert each["path"] in each["text"], each
    assert each["s"] < 5, each
    assert each["grown"] < 64 * MIB, each


@pytest.mark.parametrize(("name", "file", "text"), [
    ("it claims a part's name twice", INDEX, "it is not what dzero writes: cut short, keys twice"),
    ("it claims a bomb of names", INDEX, "Expected `object`, got `int`"),
    ("it claims an index beyond 64 MiB", INDEX, "more than the 67108864 that it may have"),
    ("it claims nested too deep, in the state", MANIFEST, "maximum recursion depth exceeded"),
    ("it claims bytes twice", INDEX, "b starts at byte 8740 where the part before ends at 8800"),
    ("it claims beyond the file", INDEX, "its parts end at byte 13004 of 12956"),
    ("it claims a dtype that is none", INDEX, "b: dtype 'F8_E9', not one of ['F32', "),
    ("it claims a dim beyond 64 bits", INDEX, "no memory holds F32 [0, 18446744073709551616]"),
    ("it claims a shape of which nothing is there", MANIFEST, "0 of 1125899906842624 elements are there"),
    ("it claims two parts in one place", MANIFEST, "a: two parts overlap at [0, 0]"),
    ("it claims a file of a terabyte", INDEX, "4 checksums for 1099511627776 bytes"),
    ("it claims false checksums", DATA, "block 0, 4096 bytes at offset 0, is not what was written"),
    ("a link in place of " + DATA, DATA, "symbolic links are not followed in checkpoints"),
    ("a pipe in place of " + INDEX, INDEX, "it is no regular file"),
    ("the pointer says up", LATEST, "'../outside' is no name of a checkpoint"),
])  # fmt: skip
def test_the_reason_is_the_right_one(seen: dict[str, dict[str, Any]], name: str, file: str, text: str) -> None:
    """Not another that a mistake in the case would give."""
    assert text in seen[name]["text"]
    assert Path(seen[name]["path"]).name == file


def test_what_claims_nothing_else_is_read(tmp_path: Path) -> None:
    """Sealed by the same helper, without a change: nothing is refused for how it was sealed."""
    shelf = honest(tmp_path / "shelf").parent
    claim(shelf / STEP, index=lambda index: None)
    assert read(shelf) == 4096 + 8800 + 60


def test_links_in_a_folder_of_checkpoints_lead_no_save_outside(tmp_path: Path) -> None:
    """A run that saves, tidies up and keeps one checkpoint touches nothing that a link there points to."""
    outside = honest(tmp_path / "outside")
    shelf = honest(tmp_path / "shelf").parent
    for name in ("step_00000007.partial", "step_00000008.going", "step_00000009"):
        (shelf / name).symlink_to(outside)
    for name in (f"{LATEST}.partial", f"{LATEST}.going"):
        (shelf / name).symlink_to(outside / MANIFEST)
    before = listed(tmp_path / "outside")
    on = CheckpointStore(shelf)
    with on.locked():
        assert sorted(on.clean()) == sorted(
            ["step_00000007.partial", "step_00000008.going", f"{LATEST}.partial", f"{LATEST}.going"]
        )
        assert on.begin(9) == "step_00000009_2"
        honest(shelf)
        assert keep(on, 1, RUN) == [STEP]
    assert sorted(os.listdir(shelf)) == [LOCK, LATEST, "step_00000001_2", "step_00000009", "step_00000009_2.partial"]
    assert listed(tmp_path / "outside") == before
    (shelf / LOCK).unlink()
    (shelf / LOCK).symlink_to(outside / "new")
    with pytest.raises(CheckpointError, match="symbolic links are not followed"), on.locked():
        pass
    assert listed(tmp_path / "outside") == before
