"""Train a plain nn.Sequential at stage 3, with AdamW's fp32 states in host memory.

torchrun --nproc-per-node=2 examples/own_loop.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import dzero

VOCAB, TOKENS, STEPS, MICROBATCHES = 64, 32, 10, 2


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCAB, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, VOCAB))
    sharded = dzero.shard(model, stage=3, offload="host", microbatches=MICROBATCHES)
    if dist.get_rank() == 0:
        print(sharded)
    optim = dzero.AdamW(sharded, lr=1e-2, max_norm=1.0)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(STEPS):
        for index in range(MICROBATCHES):
            tokens = torch.randint(VOCAB, (4, TOKENS), generator=generator).to(device)
            targets = (tokens * 7 + 3) % VOCAB
            with sharded.microbatch(is_last=index == MICROBATCHES - 1):
                loss = F.cross_entropy(sharded.model(tokens).float().flatten(0, 1), targets.flatten())
                (loss / MICROBATCHES).backward()
        optim.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, gradient norm {optim.last_decision.norm:.3f}")


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
