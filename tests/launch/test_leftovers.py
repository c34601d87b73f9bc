"""What a run leaves outside the folder of its results: nothing. And what it listens on, on one machine: nothing but
loopback, where other machines do not come."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from processes import new_tag, tagged
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


# What it listens on

LISTENING = "0A"
"""State of a socket in /proc/net/tcp."""


def listening(pids: list[int]) -> list[str]:
    """Addresses that processes listen at."""
    sockets = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(descriptor))
            except FileNotFoundError:
                continue
    found = []
    for family, table in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING and f"socket:[{words[9]}]" in sockets:
                raw = bytes.fromhex(words[1].partition(":")[0])
                whole = struct.unpack(f">{len(raw) // 4}I", raw)
                found.append(socket.inet_ntop(family, struct.pack(f"={len(whole)}I", *whole)))
    return found


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("settings", ["zero.stage=3 offload=host", "mesh.pp=2 train.accumulate=2"])
def test_a_run_listens_on_loopback_only(settings: str, tmp_path: Path) -> None:
    text = write_text(tmp_path / "words.txt")
    with running(tmp_path, text, *settings.split(), "train.steps=100000", "launch.workers=2") as run:
        run.until(r"^step=3 ")
        found = listening(run.left())
    assert len(found) >= 3, "the store and two ranks listen"
    assert {*found} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


ALONE = """
import torch
from torch import nn
from dzero import AdamW, shard

sharded = shard(nn.Linear(4, 4), stage=2, offload="host")
AdamW(sharded)
sharded.model(torch.ones(1, 4)).sum().backward()
print("ready", flush=True)
input()
"""


def test_a_process_alone_listens_on_loopback_only() -> None:
    tag = new_tag()
    command = [sys.executable, "-c", ALONE]
    env = {key: value for key, value in os.environ.items() if key != "GLOO_SOCKET_IFNAME"} | tag
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        found = listening([each.pid for each in tagged(tag)])
        process.communicate("\n")
    assert {*found} <= {"127.0.0.1", "::1"}
    assert process.returncode == 0
