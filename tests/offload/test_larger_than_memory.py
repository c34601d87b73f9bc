"""What processes really take of host memory: a quarter of the states where these are on disk, and nothing twice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

START = """
import ctypes
ctypes.CDLL(None).mallopt(-3, 65536)  # as MALLOC_MMAP_THRESHOLD_ of a fresh process, which the guide recommends
import json, sys
import torch, torch.distributed as dist
from torch import nn
from dzero import AdamW, DiskConfig, OffloadConfig, ZeroConfig, shard, testing

rank, ranks, folder, given = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(folder + "/meet", ranks), rank=rank, world_size=ranks)

def kib(field):
    return int(open("/proc/self/status").read().split(field)[1].split()[0])

def begin():
    global before
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = kib("VmRSS:")

def taken():
    return 1024 * (kib("VmHWM:") - before)

def materialise(module):
    for each in module.modules():
        if isinstance(each, nn.Linear) and each.weight.is_meta:
            each.to_empty(device="cpu").weight.data.normal_(0.0, 0.005, generator=torch.Generator().manual_seed(7))

def made(layers, kind, sizes, offload):
    with torch.device("meta"):
        model = nn.Sequential(*(kind(*sizes) for _ in range(layers)))
    sharded = shard(model, ZeroConfig(stage=3), offload=offload, init=materialise)
    return model, AdamW(sharded, lr=1e-3, max_norm=1.0, threads=1)
"""
TRAIN = """
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)

    def forward(self, x):
        return x + torch.relu(self.linear(x))

def train(layers, width, offload, steps):
    model, optim = made(layers, Block, [width], offload)
    losses = []
    for step in range(steps):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(100 * step + rank)).bfloat16()
        loss = model(x).float().square().mean()
        loss.backward()
        optim.step()
        losses.append(loss.item())
    optim.synchronize()
    return losses

layers, width, paths = given
offload = None
if paths:
    disk = DiskConfig(paths=paths, block_bytes=1 << 20)
    offload = OffloadConfig(param="disk", grad="disk", master="disk", moments="disk", disk=disk)
train(2, 64, offload, 2)  # compile, open sockets
begin()
losses = train(layers, width, offload, 4)
print(json.dumps({"losses": losses, "peak": taken()}))
dist.destroy_process_group()
"""
BUILD = """
def build(layers):
    everything = OffloadConfig(param="host", grad="host", master="host", moments="host")
    return made(layers, nn.Linear, [2048, 1024, False], everything)

build(1)
begin()
_, optim = build(*given)
print(json.dumps({"peak": taken(), "pool": testing.bytes_on_tiers(optim)["host"]}))
dist.destroy_process_group()
"""


def run(program: str, folder: Path, ranks: int, *given: object) -> list[dict[str, float]]:
    """What each rank prints at the end."""
    folder.mkdir()
    line = [sys.executable, "-c", START + program]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    words = [str(folder), json.dumps(given)]
    started = [
        subprocess.Popen([*line, str(rank), str(ranks), *words], text=True, **pipes)  # type: ignore[call-overload]
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
    far = run(TRAIN, tmp_path / "far", ranks, layers, width, places)
    near = run(TRAIN, tmp_path / "near", ranks, layers, width, [])
    assert [each["losses"] for each in far] == [each["losses"] for each in near]
    assert sum(each["peak"] for each in near) >= state_bytes
    assert sum(each["peak"] for each in far) < state_bytes / 4, far


def test_what_moves_to_the_host_is_never_there_twice(tmp_path: Path) -> None:
    """Masters in fp32 and working copies wait outside the pool, and are freed as it fills, unit by unit."""
    (found,) = run(BUILD, tmp_path / "run", 1, 12)
    unit = 2048 * 1024  # elements
    assert found["pool"] == 12 * 16 * unit
    # What is left of the first model may be freed meanwhile. At most 24 bytes for an element of one unit are beside the
    # pool; master and working copy of all units, at once, would be 12 * 6.
    assert found["pool"] - 16 * unit <= found["peak"] < found["pool"] + 6 * 4 * unit
