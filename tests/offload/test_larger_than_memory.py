"""A model trains in a quarter of the memory that its states take, with the losses of a run that has them in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, sys
import torch, torch.distributed as dist
from torch import nn
from dzero import AdamW, OffloadConfig, PrecisionConfig, ZeroConfig, shard
from dzero.hardware import peak_rss_bytes, reset_peak_rss, rss_bytes
from dzero.zero.offload_config import DiskConfig

rank, ranks, layers, width, folder, paths = int(sys.argv[1]), int(sys.argv[2]), *json.loads(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/meet", ranks), rank=rank, world_size=ranks)

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + torch.relu(self.linear(x))

def materialise(module):
    for each in module.modules():
        if isinstance(each, nn.Linear) and each.weight.is_meta:
            each.to_empty(device="cpu").weight.data.normal_(0.0, 0.005, generator=torch.Generator().manual_seed(7))

def train(layers, width, offload, steps):
    with torch.device("meta"):
        model = nn.Sequential(*(Block(width) for _ in range(layers)))
    sharded = shard(model, ZeroConfig(stage=3), offload=offload, init=materialise)
    optim = AdamW(sharded, lr=1e-3, max_norm=1.0, threads=1)
    losses = []
    for step in range(steps):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    optim.synchronize()
    return losses, optim

offload = None
if paths:
    disk = DiskConfig(paths=paths, block_bytes=1 << 20)
    offload = OffloadConfig(param="disk", grad="disk", master="disk", moments="disk", disk=disk)
train(2, 64, offload, 2)  # compile, open sockets
reset_peak_rss()
before = rss_bytes()
losses, optim = train(layers, width, offload, 4)
peak = peak_rss_bytes() - before
use = optim.offload.executor.take_use()
print(json.dumps({"losses": losses, "peak": peak, "host": optim.offload.host_bytes,
                  "spilled": use["SPILL"].moved_bytes if "SPILL" in use else 0}))
dist.destroy_process_group()
"""


GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed leaves the process at once, as README recommends


def run(folder: Path, ranks: int, layers: int, width: int, paths: list[str]) -> list[dict[str, object]]:
    folder.mkdir()
    settings = json.dumps([layers, width, str(folder), paths])
    started = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(ranks), settings],
            env={**os.environ, "OMP_NUM_THREADS": "1", **GIVE_BACK},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ended = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, [err for _, err in ended]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.parametrize(("ranks", "paths"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_quarter_of_the_states_is_enough(tmp_path: Path, ranks: int, paths: int) -> None:
    layers, width = 64, 512
    state_bytes = 16 * layers * width * width
    places = [str(tmp_path / name) for name in ("a", "b")][:paths]
    for place in places:
        Path(place).mkdir()
    far = run(tmp_path / "far", ranks, layers, width, places)
    near = run(tmp_path / "near", ranks, layers, width, [])
    assert [each["losses"] for each in far] == [each["losses"] for each in near]
    assert sum(each["peak"] for each in near) >= state_bytes  # type: ignore[misc]
    assert sum(each["peak"] for each in far) < state_bytes / 4, far  # type: ignore[misc]
    # Four steps and the first values: masters and moments (12), gradients (2, in four steps only), parameters (2).
    written = layers * width * width * (5 * 12 + 4 * 2 + 5 * 2)
    assert sum(each["spilled"] for each in far) == written  # type: ignore[misc]
