"""Save while training goes on, and go on from the latest checkpoint with the same bits.

torchrun --nproc-per-node=2 examples/save_and_resume.py checkpoints
torchrun --nproc-per-node=2 examples/save_and_resume.py checkpoints    # goes on where the first one ended
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn

import dzero

STEPS, EVERY = 6, 3


def main(folder: str) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    sharded = dzero.shard(model, stage=2, precision="fp32")
    optim = dzero.AdamW(sharded, lr=1e-2)
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=folder, every=EVERY), sharded, optim) as checkpoints:
        resumed = checkpoints.resume("auto")
        first = 0 if resumed is None else resumed.step
        for step in range(first + 1, first + STEPS + 1):
            generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
            x = torch.randn(8, 16, generator=generator).to(device)
            loss = (sharded.model(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            optim.step()
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.4f}")
            if step % EVERY == 0:
                checkpoints.save(step, extra={})  # returns when training may go on
        checkpoints.finish()  # the last one is whole, and verified


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main(sys.argv[1])
    dist.destroy_process_group()
