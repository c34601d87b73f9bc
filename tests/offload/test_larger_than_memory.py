"""A model trains in a quarter of the memory that its states take, with the losses of a run that has them in memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes
ctypes.CDLL(None).mallopt(-3, 65536)  # as MALLOC_MMAP_THRESHOLD_ of a fresh process, which the guide recommends
import json, sys
import torch, torch.distributed as dist
from torch import nn
from dzero import AdamW, DiskConfig, OffloadConfig, ZeroConfig, shard

rank, ranks, layers, width, folder, paths = int(sys.argv[1]), int(sys.argv[2]), *json.loads(sys.argv[3])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/meet", ranks), rank=rank, world_size=ranks)

def kib(field):
    return int(open("/proc/self/status").read().split(field)[1].split()[0])

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
    return losses

offload = None
if paths:
    disk = DiskConfig(paths=paths, block_bytes=1 << 20)
    offload = OffloadConfig(param="disk", grad="disk", master="disk", moments="disk", disk=disk)
train(2, 64, offload, 2)  # compile, open sockets
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = kib("VmRSS:")
losses = train(layers, width, offload, 4)
print(json.dumps({"losses": losses, "peak": 1024 * (kib("VmHWM:") - before)}))
dist.destroy_process_group()
"""


def run(folder: Path, ranks: int, layers: int, width: int, paths: list[str]) -> list[dict[str, float]]:
    folder.mkdir()
    settings = json.dumps([layers, width, str(folder), paths])
    line = [sys.executable, "-c", PROGRAM]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    started = [
        subprocess.Popen([*line, str(rank), str(ranks), settings], text=True, **pipes)  # type: ignore[call-overload]
        for rank in range(ranks)
    ]
    ended = [process.communicate(timeout=400) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, [err for _, err in ended]
    return [json.loads(out.splitlines()[-1]) for out, _ in ended]


@pytest.mark.full("tests/offload/test_schedule.py::test_units_on_disk_take_turns_in_host_memory")
@pytest.mark.parametrize(("ranks", "paths"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_quarter_of_the_states_is_enough(tmp_path: Path, ranks: int, paths: int) -> None:
    layers, width = 64, 256 * ranks  # so that states grow faster than what each process takes besides, some 16 MiB
    state_bytes = 16 * layers * width * width
    places = [str(tmp_path / name) for name in ("a", "b")][:paths]
    for place in places:
        Path(place).mkdir()
    far = run(tmp_path / "far", ranks, layers, width, places)
    near = run(tmp_path / "near", ranks, layers, width, [])
    assert [each["losses"] for each in far] == [each["losses"] for each in near]
    assert sum(each["peak"] for each in near) >= state_bytes
    assert sum(each["peak"] for each in far) < state_bytes / 4, far
