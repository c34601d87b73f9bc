"""Train a model of transformers (extra `hf`) on a few tokens; published weights load the same way.

torchrun --nproc-per-node=2 examples/transformers_model.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import dzero

STEPS, TOKENS, VOCAB = 5, 16, 64


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    sharded = dzero.shard(LlamaForCausalLM(config), stage=3)  # or LlamaForCausalLM.from_pretrained(folder)
    optim = dzero.AdamW(sharded, lr=1e-2, max_norm=1.0)
    tokens = torch.randint(VOCAB, (2, TOKENS), generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(STEPS):
        loss = sharded.model(tokens, labels=tokens).loss
        loss.backward()
        optim.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    # dzero.save_pretrained(sharded, "trained") writes it for LlamaForCausalLM.from_pretrained("trained")


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
