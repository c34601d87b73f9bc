"""States on several block devices: loop devices over files, each with a file system of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CASES = Path(__file__).parent / "inside" / "disk_cases.py"
MIB = 1 << 20
DISKS = ("first", "second")


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    """Shell commands that give a process two disks of 64 MiB, in a mount namespace that ends with it."""
    for name in DISKS:
        (tmp_path / name).mkdir()
        with (tmp_path / f"{name}.img").open("wb") as image:
            image.truncate(64 * MIB)
        subprocess.run(["mkfs.ext4", "-q", f"{tmp_path / name}.img"], check=True)
    mounts = [f"mount -o loop {tmp_path / name}.img {tmp_path / name}" for name in DISKS]
    command = ["unshare", "-m", "--propagation", "private", "sh", "-c", f'set -e; {"; ".join(mounts)}; exec "$@"', "sh"]
    if os.getuid() or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("loop devices need root, and a kernel that has them")
    return command


def test_each_device_moves_its_part_past_the_page_cache(disks: list[str], tmp_path: Path) -> None:
    """The kernel's counters of the devices: two thirds and one third of all bytes, and of journals next to nothing."""
    seen = result(disks, CASES, "devices", *(tmp_path / name for name in DISKS))
    assert seen["equal"]
    assert "direct I/O" in seen["told"]
    assert seen["read"] == [32 * MIB, 16 * MIB]
    for written, ours in zip(seen["written"], (32 * MIB, 16 * MIB), strict=True):
        assert ours <= written <= 1.05 * ours


def result(before: list[str], *words: object) -> Any:
    found = subprocess.run([*before, sys.executable, *map(str, words)], capture_output=True, text=True, env=os.environ)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])
