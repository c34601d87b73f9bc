"""Train, hand the weights to a generator, park the training states while it generates, and go on.

torchrun --nproc-per-node=2 examples/rl_weights.py    # with transformers (extra `hf`)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import dzero

ROUNDS, STEPS, TOKENS, VOCAB = 2, 2, 16, 64
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=None,
)


def load(engine: nn.Module, sharded: dzero.Sharded) -> None:
    """Copy the weights into a model of this rank's own, which stands for an inference engine."""
    into = engine.state_dict()
    for name, tensor in dzero.weights(sharded):  # on all ranks
        into[name].copy_(tensor)


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sharded = dzero.shard(LlamaForCausalLM(CONFIG), stage=3)
    optim = dzero.AdamW(sharded, lr=1e-2, max_norm=1.0)
    engine = LlamaForCausalLM(CONFIG).to(device, torch.bfloat16).eval()
    seed = torch.Generator().manual_seed(dist.get_rank())
    tokens: Tensor = torch.randint(VOCAB, (2, TOKENS), generator=seed).to(device)
    for turn in range(ROUNDS):
        for step in range(STEPS):
            loss = sharded.model(tokens, labels=tokens).loss
            loss.backward()
            optim.step()
            if dist.get_rank() == 0:
                print(f"round {turn}, step {step}: loss {loss.item():.3f}")
        load(engine, sharded)
        freed = sharded.park()  # to host memory, so that the device is the generator's
        tokens = engine.generate(tokens[:, : TOKENS // 2], max_new_tokens=TOKENS // 2, do_sample=False)
        sharded.unpark()
        if dist.get_rank() == 0:
            print(f"round {turn}: {freed} bytes were parked, and {tokens.shape[1]} tokens a sequence are there")


if __name__ == "__main__":
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    main()
    dist.destroy_process_group()
