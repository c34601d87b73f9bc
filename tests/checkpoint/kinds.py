"""Every kind of run that can save a checkpoint, or load one; and what must survive the way between two of them."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from parity_cells import whole
from torch import Tensor
from training_loops import masters_of, params_of, sharded_net, train

from dzero import AdamW, CheckpointConfig, Checkpointer, DiskConfig, OffloadConfig, Sharded

TIERS = ("device", "host", "disk")
STORED = (("bf16", "fp32", "fp32"), ("bf16", "remainder", "bf16"), ("fp32", "fp32", "fp32"), ("fp16", "fp32", "fp32"))
"""dtypes of parameters, masters and moments."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """`tier`: of masters and moments; at stage 3 of parameters too."""

    stage: int
    tier: str
    ranks: int
    net: str = "uneven"
    param: str = "bf16"
    master: str = "fp32"
    moments: str = "fp32"
    replicate: int = 1
    optimizer_shard_axes: tuple[str, ...] = ("shard",)

    def make(self, folder: Path) -> tuple[Sharded, AdamW]:
        tiers: dict[str, Any] = {}
        if self.tier != "device":
            tiers = {"grad": "host", "master": self.tier, "moments": self.tier}
            tiers |= {"param": self.tier} if self.stage == 3 and self.optimizer_shard_axes == ("shard",) else {}
        if self.tier == "disk":
            tiers["disk"] = DiskConfig(paths=[str(folder)], block_bytes=8192)
        sharded = sharded_net(
            self.net,
            stage=self.stage,
            replicate=self.replicate,
            optimizer_shard_axes=[*self.optimizer_shard_axes],
            offload=OffloadConfig(**tiers),
            param=self.param,
            master=self.master,
            moments=self.moments,
            seed=self.ranks,
        )
        return sharded, AdamW(sharded, lr=3e-3, max_norm=1.0)

    def __str__(self) -> str:
        stored = f"{self.param}-{self.master}-{self.moments}"
        over = "+".join(self.optimizer_shard_axes)
        return f"stage{self.stage}-{self.tier}-{self.ranks}of{self.replicate}-{stored}-{self.net}-{over}"


def every_kind(net: str, *, few: bool = False) -> list[Kind]:
    """All stages, tiers and numbers of ranks; how states are stored goes round, and copies where they divide.

    few: a third of them, in which every pair of a stage, a tier and a number of ranks occurs.
    """
    kinds, stored = [], itertools.cycle(STORED)
    for stage, tier, ranks in itertools.product((0, 1, 2, 3), TIERS, (1, 2, 3, 4)):
        param, master, moments = next(stored)
        if few and (stage + TIERS.index(tier) + ranks) % len(TIERS):
            continue
        replicate = 2 if ranks == 4 and stage in (1, 3) else 1
        kinds.append(
            Kind(
                stage=stage,
                tier=tier,
                ranks=ranks,
                net=net,
                param=param,
                master=master,
                moments=moments,
                replicate=replicate,
            )
        )
    random.Random(net).shuffle(kinds)
    return kinds


def everything(sharded: Sharded, optim: AdamW) -> dict[str, Tensor]:
    """Whole tensors by kind and name: parameters, fp32 masters, moments, counts of updates."""
    optim.synchronize()
    found = {f"param {name}": value for name, value in params_of(sharded).items()}
    found |= {f"master {name}": value for name, value in masters_of(sharded, optim).items()}
    for name, param in sharded.named_params().items():
        for key, value in optim.state.get(param, {}).items():
            if key in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{key} {name}"] = whole(value).clone()
    return found


def saved(rank: int, ranks: int, kinds: list[Kind], folder: Path) -> dict[Kind, dict[str, Tensor]]:
    """Train each of `kinds`, save it in a folder of its name, and tell what it held."""
    told = {}
    for kind in kinds:
        sharded, optim = kind.make(folder)
        train(sharded, optim, kind.net, steps=2)
        with Checkpointer(CheckpointConfig(folder=str(folder / str(kind))), sharded, optim) as checkpoints:
            checkpoints.save(2, {"of": str(kind)})
            told[kind] = everything(sharded, optim)
            checkpoints.finish()
        optim.offload.executor.close()
    return told if rank == 0 else {}


def loaded(rank: int, ranks: int, pairs: list[tuple[Kind, Kind]], folder: Path) -> list[dict[str, Tensor]]:
    """Load (source, own) each, tell what it then holds, and go on training."""
    told = []
    for source, kind in pairs:
        sharded, optim = kind.make(folder)
        with Checkpointer(CheckpointConfig(folder=str(folder / str(source))), sharded, optim) as checkpoints:
            resumed = checkpoints.resume("auto")
            assert resumed is not None
            assert (resumed.step, resumed.extra) == (2, {"of": str(source)})
        told.append(everything(sharded, optim))
        train(sharded, optim, kind.net, steps=1, seed=1)
        assert torch.isfinite(torch.tensor(optim.last_decision.norm if optim.last_decision else 0.0))
        optim.offload.executor.close()
    return told if rank == 0 else []
