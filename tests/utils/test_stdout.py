"""Output never ends a run: what cannot be shown or written is told once, and training goes on to its last step."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from processes import new_tag, tagged
from small_runs import ROOT, SMALL, write_text
from train_runs import SECONDS, SMALLEST

SAVING = ("checkpoint.every=2", "launch.workers=1")
READER = "tests/utils/test_stdout.py::test_a_run_whose_reader_leaves_after_a_line_trains_and_saves_to_the_end"
LOST = "standard output takes no more"


def started(folder: Path, *settings: str, **options: Any) -> subprocess.Popen[str]:
    """`python train.py` of the smallest run in `folder`, with its stderr in a pipe."""
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
    line = [sys.executable, str(ROOT / "train.py"), f"data.path={write_text(folder / 'text.txt')}", *settings]
    return subprocess.Popen(line, cwd=folder, env=env, text=True, **{"stderr": subprocess.PIPE, **options})


def check_whole(folder: Path, run: subprocess.Popen[str], err: str) -> None:
    """The run ended well, with its last step saved and nothing of Python's on stderr."""
    assert run.returncode == 0, err
    assert (folder / "checkpoints" / "step_00000003").is_dir(), err
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_a_run_whose_reader_leaves_after_a_line_trains_and_saves_to_the_end(tmp_path: Path) -> None:
    run = started(tmp_path, *SMALLEST, *SAVING, stdout=subprocess.PIPE)
    assert run.stdout is not None
    assert run.stdout.readline()
    run.stdout.close()  # as `head -1` does
    assert run.stderr is not None
    err = run.stderr.read()
    run.wait(SECONDS)
    check_whole(tmp_path, run, err)
    assert err.count(LOST) == 1
    assert "Broken pipe" in err


@pytest.mark.full(READER)
def test_a_run_onto_a_full_disk_trains_and_saves_to_the_end(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        run = started(tmp_path, *SMALLEST, *SAVING, stdout=full)
        _, err = run.communicate(timeout=SECONDS)
    check_whole(tmp_path, run, err)
    assert err.count("No space left on device") == 1


@pytest.mark.full(READER)
def test_event_files_that_cannot_be_written_do_not_end_a_run(tmp_path: Path) -> None:
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))

    settings = [*SMALL.split(), "train.steps=20", "monitor.plan=false", "launch.workers=1", "hydra.output_subdir=null"]
    run = started(tmp_path, *settings, stdout=subprocess.PIPE, preexec_fn=small_files)
    out, err = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, err
    assert "step=20 loss=" in out
    assert out.count("TensorBoardSink failed, the run goes on without it: OSError: [Errno 27] File too large") == 1
    assert "Traceback" not in err


@pytest.mark.full(READER)
def test_a_run_in_the_background_of_a_terminal_with_tostop_is_not_stopped(tmp_path: Path) -> None:
    """Its workers write from a session of their own; its shell tells of a job that stops with exit code 150."""
    ours, theirs = os.openpty()
    settings = [*SMALLEST, f"data.path={write_text(tmp_path / 'text.txt')}", "train.steps=1", "launch.workers=1"]
    left_out, tag = ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR"), new_tag()
    shell = subprocess.Popen(
        ["bash", "-mc", 'stty tostop; "$@" & wait $!', "bash", sys.executable, str(ROOT / "train.py"), *settings],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key not in left_out} | tag,
        **dict.fromkeys(("stdin", "stdout", "stderr"), theirs),
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(theirs)
    said, until_s = b"", time.monotonic() + SECONDS
    try:
        with suppress(OSError):  # all that had the terminal have left
            while select.select([ours], [], [], max(0.0, until_s - time.monotonic()))[0]:
                said += os.read(ours, 4096)
        assert shell.wait(SECONDS) == 0, said.decode()
        assert b"held-out loss" in said  # of the table at the end
    finally:
        for process in tagged(tag):
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        shell.wait(SECONDS)
        os.close(ours)
