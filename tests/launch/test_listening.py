"""What a run on one machine listens on: nothing but loopback, where other machines do not come."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from processes import new_tag, tagged
from small_runs import write_text
from train_runs import running

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


RUNS = ["zero.stage=3 offload=host", "mesh.pp=2 train.accumulate=2", "mesh.tp=2 model.kv_heads=2"]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("settings", RUNS)
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
