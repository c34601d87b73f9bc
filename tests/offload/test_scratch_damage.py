"""A scratch file that is damaged under a run ends it, on all ranks, with one line that says what and where."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

from small_runs import write_text
from train_runs import SECONDS, running


def damage(pid: int) -> None:
    """Overwrite a worker's scratch files, which have lost their names."""
    with contextlib.suppress(OSError):  # files are closed, and the worker ends, meanwhile
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if re.search(r"/dzero-\d+-\d+-[0-9a-f]{16}/data \(deleted\)$", os.readlink(link)):
                size = link.stat().st_size
                with link.open("r+b", buffering=0) as file:
                    file.write(os.urandom(size))


def test_a_run_whose_scratch_file_is_damaged_names_path_and_block(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    # Of two layers all states stay in host memory; of eight they are read again in every step.
    settings = ["offload=disk", f"offload.disk.paths=[{tmp_path / 'disk'}]", "train.steps=9999", "model.layers=8"]
    with running(tmp_path / "run", write_text(tmp_path / "text.txt"), *settings) as run:
        run.until(r"^step=3 ")
        victim = run.workers()[1]
        until_s = time.monotonic() + SECONDS
        while run.process.poll() is None and time.monotonic() < until_s:
            damage(victim)
        assert run.end(1.0) == 1
        assert "Traceback" not in run.log, run.log
        (line,) = [line for line in run.log.splitlines() if line.startswith("error: ")]
        assert re.search(rf"{tmp_path / 'disk'}: block \d+ of piece '.*', .* is not what was written", line), line
        assert not run.left()
