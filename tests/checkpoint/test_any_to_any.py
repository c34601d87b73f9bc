"""A checkpoint of any stage, tier, kind of master and world size loads into any other, exactly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cells import whole
from loops import masters_of, params_of, sharded_net, train
from pool import Pool
from torch import Tensor

from dzero import AdamW, OffloadConfig, Sharded
from dzero.checkpoint.checkpoints import Checkpoints
from dzero.checkpoint.config import CheckpointConfig
from dzero.zero.tiers import DiskConfig

TIERS: dict[str, dict[str, str]] = {
    "device": {},
    "host": {"grad": "host", "master": "host", "moments": "host"},
    "disk": {"grad": "host", "master": "disk", "moments": "disk"},
}


@dataclass(frozen=True, kw_only=True)
class Kind:
    stage: int
    tier: str
    ranks: int
    master: str = "fp32"
    moments: str = "fp32"
    param: str = "bf16"
    replicate: int = 1
    net: str = "uneven"

    def make(self, folder: Path) -> tuple[Sharded, AdamW]:
        tiers: dict[str, Any] = dict(TIERS[self.tier])
        if self.tier == "disk":
            tiers["disk"] = DiskConfig(paths=[str(folder)], block_bytes=8192)
        sharded = sharded_net(
            self.net,
            stage=self.stage,
            replicate=self.replicate,
            offload=OffloadConfig(**tiers),
            param=self.param,
            master=self.master,
            moments=self.moments,
        )
        return sharded, AdamW(sharded, lr=3e-3, max_norm=1.0)


def everything(sharded: Sharded, optim: AdamW) -> dict[str, Tensor]:
    """Whole tensors: parameters, fp32 masters, moments, counts."""
    optim.synchronize()
    found = {f"param.{name}": value for name, value in params_of(sharded).items()}
    found |= {f"master.{name}": value for name, value in masters_of(sharded, optim).items()}
    for name, param in sharded.named_params().items():
        for key, value in optim.state.get(param, {}).items():
            if key in ("exp_avg", "exp_avg_sq", "step"):
                found[f"{key}.{name}"] = whole(value).clone()
    return found


def saved(rank: int, ranks: int, kind: Kind, folder: Path) -> dict[str, Tensor]:
    sharded, optim = kind.make(folder)
    train(sharded, optim, kind.net, steps=3)
    with Checkpoints(CheckpointConfig(folder=str(folder / "ck")), sharded, optim) as checkpoints:
        checkpoints.save(3, {"note": "hello"}, {"rank": torch.tensor([rank])})
        before = everything(sharded, optim)
        assert checkpoints.finish() == "step_00000003"
    return before


def loaded(rank: int, ranks: int, kind: Kind, folder: Path) -> dict[str, Tensor]:
    sharded, optim = kind.make(folder)
    with Checkpoints(CheckpointConfig(folder=str(folder / "ck")), sharded, optim) as checkpoints:
        resumed = checkpoints.resume("auto")
        assert resumed is not None
        assert resumed.extra == {"note": "hello"}
        after = everything(sharded, optim)
    train(sharded, optim, kind.net, steps=2)
    return after


def test_one(pool: Pool, tmp_path: Path) -> None:
    want = pool.run(saved, 2, Kind(stage=3, tier="host", ranks=2, master="remainder"), tmp_path)[0]
    kinds = (
        Kind(stage=3, tier="disk", ranks=3),
        Kind(stage=0, tier="device", ranks=1),
        Kind(stage=2, tier="host", ranks=4, replicate=2),
        Kind(stage=1, tier="device", ranks=2, master="remainder", moments="bf16"),
    )
    for kind in kinds:
        for got in pool.run(loaded, kind.ranks, kind, tmp_path):
            assert got.keys() == want.keys()
            for key in want:
                if kind.moments == "bf16" and key.startswith("exp"):
                    assert torch.equal(got[key], want[key].bfloat16()), key
                else:
                    assert torch.equal(got[key], want[key]), (kind, key)
