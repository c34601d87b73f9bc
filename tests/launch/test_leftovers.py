"""What a run that ends leaves outside the folder of its results: nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from small_runs import write_text
from train_runs import TORCHRUN, running
from typed_commands import typed

EXIT_SAVED = 75
"""The exit code that the guide promises of a run that was stopped and is saved."""

TORCHRUN_OF_TWO = (*TORCHRUN, "--standalone", "--nproc-per-node=2")
OF_TORCH = ("torchinductor_", "torchelastic_")
"""Folders that torch leaves in the folder for temporary files."""
ENDS = {
    "the last step": ("train.steps=2", "", 0),
    "a signal": ("train.steps=100000 checkpoint.every=1000", r"^step=3 ", EXIT_SAVED),
    "an error": ("train.steps=100000 optim.lr=1e30 train.on_nan=stop", "", 1),
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("launcher", [(), TORCHRUN_OF_TWO], ids=["plain", "torchrun"])
@pytest.mark.parametrize("end", ENDS)
def test_nothing_is_left_of_a_run_that_ended(launcher: tuple[str, ...], end: str, tmp_path: Path) -> None:
    settings, until, code = ENDS[end]
    (scratch := tmp_path / "scratch").mkdir()
    (temporary := tmp_path / "temporary").mkdir()
    disk = ("zero.stage=3", "offload=infinity", "offload.activations=disk", f"offload.disk.paths=[{scratch}]")
    blocks = ("offload.disk.block_bytes=8192", *([] if launcher else ["launch.workers=2"]))
    text, prefix = write_text(tmp_path / "words.txt"), f"env TMPDIR={temporary}"
    with running(tmp_path, text, *settings.split(), *disk, *blocks, launcher=launcher, prefix=prefix) as run:
        if until:
            run.until(until)
            assert [*scratch.iterdir()] != []
            os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == (code if not launcher or code in (0, 1) else 1), run.log
        assert run.left() == []
    assert [*scratch.iterdir()] == []
    assert [path for path in temporary.iterdir() if not path.name.startswith(OF_TORCH)] == []


UNCLOSED = """
import os
import dzero
import torch
import torch.distributed as dist
from torch import nn

if "RANK" in os.environ:
    dist.init_process_group("gloo")
sharded = dzero.shard(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)), stage=3, precision="fp32")
optim = dzero.AdamW(sharded)
checkpoints = dzero.Checkpointer(dzero.CheckpointConfig(folder="saved", every=1), sharded, optim)
sharded.model(torch.ones(2, 16)).sum().backward()
optim.step()
checkpoints.save(1, {})
"""


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("launcher", [(), TORCHRUN_OF_TWO], ids=["plain", "torchrun"])
def test_a_program_that_ends_during_a_save_leaves_the_checkpoint(launcher: tuple[str, ...], tmp_path: Path) -> None:
    """Nobody closes the Checkpointer, and the last save is still being written when the program is over."""
    (tmp_path / "own.py").write_text(UNCLOSED)
    ended = typed(*launcher, tmp_path / "own.py", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "not saved" not in ended.stderr
    inspected = typed("-m", "dzero", "inspect", tmp_path / "saved", "--verify", cwd=tmp_path)
    assert inspected.returncode == 0, inspected.stderr
    assert "step" in inspected.stdout
