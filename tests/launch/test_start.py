"""Starting is light: what only shows something imports no torch, and neither does the process that starts workers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from ipv6_only import NOT_PERMITTED
from small_runs import ROOT, write_text
from train_runs import SMALLEST
from typed_commands import typed as typed_warm

HEAVY = {"torch", "numpy", "numba", "tensorboard", "transformers"}
TRAIN = str(ROOT / "train.py")


def imported(stderr: str) -> set[str]:
    """Top-level packages in what `python -X importtime` tells."""
    return {line.split("|")[2].strip().split(".")[0] for line in stderr.splitlines() if line.startswith("import time:")}


def typed(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`python -X importtime train.py words`, in a folder."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    line = [sys.executable, "-X", "importtime", TRAIN, *words]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=240)


SHOWN = {"--help": "zero.stage=2", "--cfg job zero.stage=3": "stage: 3"}


@pytest.mark.parametrize("line", SHOWN)
def test_what_shows_something_imports_no_torch(line: str, tmp_path: Path) -> None:
    ended = typed(tmp_path, *line.split())
    assert ended.returncode == 0, ended.stderr
    assert SHOWN[line] in ended.stdout
    assert imported(ended.stderr) & HEAVY == set()
    assert list(tmp_path.iterdir()) == []


def test_the_process_that_starts_workers_imports_no_torch(tmp_path: Path) -> None:
    write_text(tmp_path / "words.txt", 4000)
    ended = typed(tmp_path, *SMALLEST, "data.path=words.txt", "train.steps=1", "launch.workers=1")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^step=1 loss=", ended.stdout, re.MULTILINE)
    assert imported(ended.stderr) & HEAVY == set()


@pytest.mark.full("tests/launch/test_start.py::test_the_process_that_starts_workers_imports_no_torch")
def test_nor_does_it_to_tell_why_one_failed(tmp_path: Path) -> None:
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"te')
    failed = typed(tmp_path, *SMALLEST, "data.path=broken.jsonl", "train.steps=1", "launch.workers=1")
    assert re.search(r"error: (.|\n)*broken.jsonl line 2 is not JSON", failed.stderr)
    assert imported(failed.stderr) & HEAVY == set()


def test_help_says_what_every_setting_means(tmp_path: Path) -> None:
    """Two blanks and more stand between a setting and its meaning, which goes on further right."""
    shown = typed_warm("train.py", "--help", cwd=tmp_path).stdout.splitlines()
    first = shown.index(next(line for line in shown if line.startswith("run: ")))
    settings = [line for line in shown[first:] if re.match(r"  [a-z_.0-9]+=(?!\.\.\. takes)", line)]
    assert len(settings) > 150
    assert [line for line in settings if not re.match(r"  \S.*?\S  +\S", line)] == []
    groups = [line for line in shown[first:] if re.match(r"[a-z_]+:", line)]
    assert len(groups) > 15
    assert [line for line in groups if not re.match(r"[a-z_]+: \S", line)] == []


@pytest.mark.full("tests/launch/test_leftovers.py::test_a_run_listens_on_loopback_only")
def test_workers_meet_on_a_host_that_has_only_ipv6(tmp_path: Path) -> None:
    data = write_text(tmp_path / "words.txt", 4000)
    line = [sys.executable, str(ROOT / "tests/support/ipv6_only.py"), sys.executable, TRAIN, *SMALLEST]
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")}
    settings = [f"data.path={data}", "train.steps=1", "launch.workers=2"]
    ended = subprocess.run([*line, *settings], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    if ended.returncode == NOT_PERMITTED:
        pytest.skip(f"no network namespace can be made here: {ended.stdout}")
    assert ended.returncode == 0, ended.stderr
    assert re.search(r"^step=1 loss=", ended.stdout, re.MULTILINE)
