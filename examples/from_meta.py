"""Shard a model that no process could hold whole: built on meta, filled and cut unit by unit.

torchrun --nproc-per-node=2 examples/from_meta.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import dzero


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def fill(module: nn.Module) -> None:
    """Give one unit's modules their values: to_empty, then torch's own reset_parameters. The same on every rank."""
    torch.manual_seed(0)
    module.to_empty(device="cuda" if torch.cuda.is_available() else "cpu")
    for each in module.modules():
        if hasattr(each, "reset_parameters"):
            each.reset_parameters()


def main() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(64) for _ in range(4)))
    sharded = dzero.shard(model, stage=3, init=fill)
    optim = dzero.AdamW(sharded, lr=1e-2)
    for step in range(3):
        loss = (sharded.model(torch.ones(2, 64)) - 2).float().square().mean()
        loss.backward()
        optim.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
