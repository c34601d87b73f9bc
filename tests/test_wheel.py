"""An installed wheel trains, plans and explains: it has the configuration, and the command."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from small_runs import ROOT, write_text

import dzero


@pytest.mark.full("tests/plan/test_plan.py::test_a_run_that_fits_says_so_and_one_that_does_not_says_by_how_much")
def test_a_wheel_in_a_fresh_environment_trains_plans_and_explains(tmp_path: Path) -> None:
    (wheel,) = built(tmp_path / "wheels")
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    conf = {f"dzero/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert conf | {"dzero/py.typed"} <= names
    assert not {name for name in names if name.split("/")[0] not in ("dzero", f"dzero-{dzero.__version__}.dist-info")}

    bin_folder, work = fresh(tmp_path / "venv", wheel), tmp_path / "work"
    work.mkdir()
    data = write_text(work / "words.txt", 4000)
    small = ["model.hidden_size=32", "model.layers=2", "model.heads=2", "model.ffn_size=48", "train.sequence_tokens=32"]
    small += ["train.microbatch_sequences=2", f"data.path={data}", "data.held_out=0.1"]

    told = ran(work, bin_folder / "dzero", "train", *small, "train.steps=3", "launch.workers=1", "zero.stage=3")
    assert "\nstep=3 loss=" in told
    assert "stage 3 on 1 cpu ranks" in told
    told = ran(work, bin_folder / "dzero", "plan", *small, "mesh.dp=8", "hardware=h100_80g")
    assert "fits" in told.splitlines()[-1]
    told = ran(work, bin_folder / "python", "-m", "dzero", "explain", *small, "mesh.dp=2", "experiment=none")
    assert "mesh.dp" in told
    assert ran(work, bin_folder / "dzero", "--version") == f"dzero {dzero.__version__}\n"


def built(folder: Path) -> list[Path]:
    """The wheel, made from a copy of what the build needs, so that the checkout stays as it is."""
    line = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(line, check=True, capture_output=True, text=True, timeout=600)
    return [*folder.glob("dzero-*.whl")]


def fresh(folder: Path, wheel: Path) -> Path:
    """A new environment with the wheel alone, which sees this one's other packages; its folder of commands."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=600)
    python = folder / "bin/python"
    subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-deps", str(wheel)], check=True, timeout=600)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")  # whose .pth files are not followed
    told = ran(folder, python, "-c", "import dzero; print(dzero.__file__)")
    assert Path(told.strip()).is_relative_to(own), told
    return folder / "bin"


def ran(folder: Path, *words: str | Path) -> str:
    """What a command prints; it must succeed."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "PYTHONPATH")}
    ended = subprocess.run([*map(str, words)], cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, f"{words}: {ended.stdout}\n{ended.stderr}"
    return ended.stdout
