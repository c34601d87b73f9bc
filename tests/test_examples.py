"""Every script of examples/ runs on two ranks, and its loss falls."""

from __future__ import annotations

import io
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from pool import Pool

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
MOST_LINES = 80


def main_of(rank: int, ranks: int, script: str, words: list[str]) -> str:
    """Run a script's `main` in the group that is there; return what it prints."""
    told = io.StringIO()
    with redirect_stdout(told):
        runpy.run_path(str(EXAMPLES / script))["main"](*words)
    return told.getvalue()


def losses_in(told: str) -> list[float]:
    return [float(line.split("loss ")[1].split(",")[0]) for line in told.splitlines() if "loss " in line]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_example_runs_and_learns(pool: Pool, script: str, tmp_path: Path) -> None:
    assert (EXAMPLES / script).read_text().count("\n") <= MOST_LINES
    words = [str(tmp_path / "checkpoints")] if script == "save_and_resume.py" else []
    losses = losses_in(pool.run(main_of, 2, script, words)[0])
    assert len(losses) >= 3
    assert losses[-1] < losses[0]
    if words:
        again = pool.run(main_of, 2, script, words)[0]
        assert again.splitlines()[0].startswith(f"step {len(losses) + 1}: ")


def test_one_of_them_runs_as_it_says(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(EXAMPLES / "own_loop.py")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("Sharded(Sequential")
