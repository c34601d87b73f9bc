"""Ray Train starts the ranks; dzero shards, saves, and goes on after a worker died.

pip install -e '.[ray]'
python examples/ray_train.py /shared/folder 12                              # 12 steps of a loop of one's own
python examples/ray_train.py /shared/folder zero.stage=3 train.steps=20     # train.py and its settings
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn

import dzero

EVERY = 3
TRAIN = Path(__file__).resolve().parents[1] / "train.py"


def own_loop(config: dict[str, Any]) -> None:
    """One rank, in the process group that Ray made."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    sharded = dzero.shard(model, stage=3, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-2)
    saved = dzero.CheckpointConfig(folder=f"{config['folder']}/checkpoints", every=EVERY)
    with dzero.Checkpointer(saved, sharded, optim) as checkpoints:
        resumed = checkpoints.resume("auto")
        first = 0 if resumed is None else resumed.step
        print(f"goes on after step {first}")
        for step in range(first + 1, config["steps"] + 1):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            x = torch.randn(8, 16, generator=generator).to(device)
            loss = (sharded.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optim.step()
            ray.train.report({"step": step, "loss": loss.item()})
            if step % EVERY == 0:
                checkpoints.save(step, extra={})
        checkpoints.finish()


def train_py(config: dict[str, Any]) -> None:
    """One rank of train.py, which makes its own process group at the address that Ray chose."""
    dist.barrier()
    dist.destroy_process_group()
    saving = [f"checkpoint.folder={config['folder']}/checkpoints", "checkpoint.every=10", "resume=auto"]
    subprocess.run([sys.executable, str(TRAIN), *saving, *config["settings"]], check=True)


def main(folder: str, *words: str) -> None:
    has_gpus, is_own = torch.cuda.is_available(), words[0].isdigit()
    trainer = TorchTrainer(
        own_loop if is_own else train_py,
        train_loop_config={"folder": folder, **({"steps": int(words[0])} if is_own else {"settings": words})},
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if has_gpus else "gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=has_gpus),
        run_config=RunConfig(storage_path=f"{folder}/ray", failure_config=FailureConfig(max_failures=3)),
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main(*sys.argv[1:])
