"""Cut the project's decoder along tensor parallelism, and shard what is left over the other ranks at stage 2.

torchrun --nproc-per-node=2 examples/parallel.py    # tp 2; on four ranks also dp 2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F

import dzero
from dzero.models.config import LlamaShape
from dzero.models.llama import Llama

STEPS, TOKENS = 5, 16
SHAPE = LlamaShape(vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=64)


def main() -> None:
    torch.manual_seed(0)
    mesh = dzero.make_mesh("cuda" if torch.cuda.is_available() else "cpu", tp=2)
    cut = dzero.parallelize(Llama(SHAPE), mesh)
    sharded = dzero.shard(cut, stage=2)
    optim = dzero.AdamW(sharded, lr=1e-2)
    reader = dist.get_rank() // 2  # ranks that share a model read the same sequences
    tokens = torch.randint(64, (2, TOKENS + 1), generator=torch.Generator().manual_seed(reader)).to(mesh.device_type)
    for step in range(STEPS):
        with sharded.microbatch(), cut.loss():  # logits stay cut along the vocabulary
            logits = sharded.model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        optim.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {float(loss.full_tensor() if hasattr(loss, 'full_tensor') else loss):.3f}")


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
