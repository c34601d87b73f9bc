"""Whatever a user makes anew many times in a process, and what the process has of what could be left behind."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import decoders
import torch
from small_runs import settled, write_text
from torch import nn
from torch.distributed import distributed_c10d

from dzero import (
    AdamW,
    CheckpointConfig,
    Checkpointer,
    DiskConfig,
    Muon,
    OffloadConfig,
    ParallelConfig,
    TorchOptimizer,
    make_mesh,
    parallelize,
    shard,
    take_mesh,
)
from dzero.trainer.trainer import Trainer

Make = Callable[[Path], None]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 4))


def trained(optimizer: Callable[..., Any] = AdamW, mesh: Any = None, **settings: Any) -> tuple[Any, Any]:
    sharded = shard(net(), precision="fp32", mesh=mesh, **settings)
    optim = optimizer(sharded, lr=0.1)
    sharded.model(torch.ones(2, 6)).sum().backward()
    optim.step()
    optim.zero_grad()
    return sharded, optim


def adafactor(sharded: Any, lr: float) -> TorchOptimizer:
    return TorchOptimizer(sharded, torch.optim.Adafactor, lr=lr)


def on_disk(folder: Path) -> OffloadConfig:
    tiers = dict.fromkeys(("param", "grad", "master", "moments"), "disk")
    return OffloadConfig(**tiers, disk=DiskConfig(paths=[str(folder)], block_bytes=4096))  # type: ignore[arg-type]


def saved(folder: Path) -> None:
    sharded, optim = trained(stage=2)
    with Checkpointer(CheckpointConfig(folder=str(folder), every=1), sharded, optim) as checkpoints:
        checkpoints.save(1, {})
        checkpoints.finish()
        checkpoints.resume("auto")


def cut(**axes: int) -> None:
    """A model that two ranks cut."""
    model = decoders.on_meta(32, hidden_size=16, heads=2, ffn_size=16)
    fill = decoders.filling(model)
    of_mesh = {axis: ranks for axis, ranks in axes.items() if axis in ("tp", "pp")}
    mesh = make_mesh("cpu", **of_mesh)
    made = parallelize(model, mesh, ParallelConfig(cp=axes.get("cp", 1)))
    AdamW(shard(made, stage=1, mesh=mesh, init=fill), lr=0.1)


def of_another_mesh(folder: Path) -> None:
    trained(mesh=take_mesh(make_mesh("cpu"), {"replicate": "replicate", "shard": "shard"}))


def of_a_trainer(folder: Path) -> None:
    text = folder.parent / "words.txt"
    if torch.distributed.get_rank() == 0 and not text.exists():
        write_text(text)
    torch.distributed.barrier()
    saves = [f"checkpoint.folder={folder / 'checkpoints'}", "checkpoint.every=1", "train.steps=2"]
    config = settled(text, *saves, "monitor.tensorboard=false")
    Trainer(config, folder, torch.device("cpu")).run()


KINDS: dict[str, Make] = {
    **{f"stage {stage}": lambda folder, stage=stage: trained(stage=stage) and None for stage in range(4)},  # type: ignore[misc]
    "replicas": lambda folder: trained(stage=3, mesh=make_mesh("cpu", replicate=2)) and None,
    "host": lambda folder: trained(stage=3, offload="host") and None,
    "all on the host": lambda folder: trained(stage=3, offload="host_all") and None,
    "disk": lambda folder: trained(stage=3, offload=on_disk(folder)) and None,
    "muon on the host": lambda folder: trained(Muon, stage=3, offload="host") and None,
    "Adafactor": lambda folder: trained(adafactor, stage=3) and None,
    "checkpoints": saved,
    "tensor": lambda folder: cut(tp=2),
    "pipeline": lambda folder: cut(pp=2),
    "sequence": lambda folder: cut(cp=2),
    "another mesh": of_another_mesh,
    "trainer": of_a_trainer,
}


WHAT = ("groups", "descriptors", "threads", "scratch_folders", "rss_mib")


def of_process(pid: int | str) -> tuple[int, int, float]:
    """Descriptors, threads and memory in MiB."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    descriptors, threads = (len(os.listdir(f"/proc/{pid}/{kind}")) for kind in ("fd", "task"))
    return descriptors, threads, pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def resources(folder: Path) -> list[float]:
    """What this process has, by `WHAT`; scratch folders are those below `folder`."""
    gc.collect()
    descriptors, threads, rss_mib = of_process("self")
    groups, scratch_folders = len(distributed_c10d._world.pg_map), len([*folder.glob("*/dzero-*")])
    return [groups, descriptors, threads, scratch_folders, rss_mib]


def cycles(kind: str, number: int, folder: Path) -> Iterator[int]:
    """Make one kind `number` times; yield how often it was made."""
    for cycle in range(number):
        (of_cycle := folder / str(cycle)).mkdir(exist_ok=True)
        KINDS[kind](of_cycle)
        yield cycle + 1
