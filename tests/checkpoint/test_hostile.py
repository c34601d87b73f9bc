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
import written_checkpoints as by_hand
from hostile_cases import CLAIMS, DATA, INDEX, KINDS, POINTERS, STEP, claim, honest, instead
from pool import Pool
from training_loops import sharded_net
from written_checkpoints import LATEST, LOCK, MANIFEST

from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError

HOUSE = Path(__file__).parent.parent.parent
CASES = Path(__file__).parent / "hostile_cases.py"
MOST_GROWN = 64 << 20
"""What reading an index of the largest size may take; the claims are of terabytes."""
PLACES = (DATA, INDEX, MANIFEST, LATEST, STEP)
NAMES = [
    *(f"it claims {claim}" for claim in CLAIMS),
    *(f"the pointer says {pointer}" for pointer in POINTERS),
    *(f"{kind} in place of {place}" for kind in KINDS for place in PLACES),
]
REASONS = {
    "it claims a part's name twice": (INDEX, "it is not what dzero writes: cut short, keys twice"),
    "it claims a bomb of names": (INDEX, "Expected `object`, got `int`"),
    "it claims an index beyond 64 MiB": (INDEX, "more than the 67108864 that it may have"),
    "it claims nested too deep, in the state": (MANIFEST, "maximum recursion depth exceeded"),
    "it claims bytes twice": (INDEX, "b starts at byte 8740 where the part before ends at 8800"),
    "it claims beyond the file": (INDEX, "its parts end at byte 13004 of 12956"),
    "it claims a dtype that is none": (INDEX, "b: dtype 'F8_E9', not one of ['F32', "),
    "it claims a dim beyond 64 bits": (INDEX, "no memory holds F32 [0, 18446744073709551616]"),
    "it claims a shape of which nothing is there": (MANIFEST, "0 of 1125899906842624 elements are there"),
    "it claims two parts in one place": (MANIFEST, "a: two parts overlap at [0, 0]"),
    "it claims a file of a terabyte": (INDEX, "4 checksums for 1099511627776 bytes"),
    "it claims false checksums": (DATA, "is not what was written"),
    f"a link in place of {DATA}": (DATA, "symbolic links are not followed in checkpoints"),
    f"a pipe in place of {INDEX}": (INDEX, "it is no regular file"),
    "the pointer says up": (LATEST, "'../outside' is no name of a checkpoint"),
}
"""The file and the reason of some, which another mistake in the case would not give."""


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
        *(lambda shelf, n=name: by_hand.point(shelf, n) for name in POINTERS.values()),
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
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr
    after = {path: told for path, told in listed(root).items() if not path.startswith(f"{root}/honest")}
    assert after == before
    return dict(zip(NAMES, json.loads(run.stdout.splitlines()[-1]).values(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_refused_with_its_file_in_little_memory(seen: dict[str, dict[str, Any]], name: str) -> None:
    each = seen[name]
    assert each["refused"], each
    assert each["path"].startswith(each["shelf"]), each
    assert each["path"] in each["text"], each
    assert each["grown"] < MOST_GROWN, each
    if name in REASONS:
        file, text = REASONS[name]
        assert text in each["text"]
        assert Path(each["path"]).name == file


def test_what_claims_nothing_else_is_read(tmp_path: Path) -> None:
    """Sealed by the same helper, without a change: nothing is refused for how it was sealed."""
    claim(honest(tmp_path / "shelf"), index=lambda index: None)
    assert by_hand.verified(tmp_path / "shelf") == 4096 + 8800 + 60


def saved_beside_links(rank: int, ranks: int, folder: Path) -> str:
    """Resume and save where links lead to `outside`, then where the lock is one; what is said of the lock."""
    sharded = sharded_net(stage=1)
    optim, config = AdamW(sharded), CheckpointConfig(folder=str(folder / "shelf"), keep=1)
    with Checkpointer(config, sharded, optim) as checkpoints:
        checkpoints.save(1, {})
    for name in ("step_00000007.partial", "step_00000008.going", "step_00000009"):
        (folder / "shelf" / name).symlink_to(folder / "outside")
    for name in (f"{LATEST}.partial", f"{LATEST}.going"):
        (folder / "shelf" / name).symlink_to(folder / "outside" / MANIFEST)
    with Checkpointer(config, sharded, optim) as checkpoints:
        checkpoints.resume("auto")
        checkpoints.save(9, {})
    (folder / "shelf" / LOCK).unlink()
    (folder / "shelf" / LOCK).symlink_to(folder / "outside" / "new")
    with pytest.raises(CheckpointError) as told:
        Checkpointer(CheckpointConfig(folder=config.folder, every=1), sharded, optim)
    return str(told.value)


def test_links_in_a_folder_of_checkpoints_lead_no_save_outside(pool: Pool, tmp_path: Path) -> None:
    """A run that saves, tidies up and keeps one checkpoint touches nothing that a link there points to."""
    honest(tmp_path / "shelf").rename(tmp_path / "outside")
    (tmp_path / "shelf" / LATEST).unlink()
    before = listed(tmp_path / "outside")
    (told,) = pool.run(saved_beside_links, 1, tmp_path)
    assert "symbolic links are not followed" in told
    assert sorted(os.listdir(tmp_path / "shelf")) == [LOCK, LATEST, "step_00000009", "step_00000009_2"]
    assert listed(tmp_path / "outside") == before
