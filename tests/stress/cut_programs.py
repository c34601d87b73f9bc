"""What cut_links.py runs on its nodes: the host of a store, a loop of one's own, and a run of `DzeroTrainer`."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but torch leaves it out of __all__


def host(address: str, port: str) -> None:
    """Host a store until the end."""
    store = TCPStore(address, int(port), is_master=True, wait_for_workers=False)
    while store is not None:
        signal.pause()


def loop(timeout_s: str) -> None:
    """Train by a loop, for ever; a timeout of 0 is torch's own."""
    from dzero import AdamW, shard

    dist.init_process_group("gloo", timeout=timedelta(seconds=float(timeout_s)) if float(timeout_s) else None)
    sharded = shard(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), stage=3, precision="fp32")
    optim, step = AdamW(sharded), 0
    while True:
        sharded.model(torch.randn(4, 64)).square().mean().backward()
        optim.step()
        optim.zero_grad()
        step += 1
        print(f"step={step}", flush=True)


def trainer(timeout_s: str) -> None:
    """Train by `DzeroTrainer`, for ever."""
    import transformers

    from dzero.integrations.transformers import DzeroTrainer

    class Says(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            print(f"step={state.global_step}", flush=True)

    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, **sizes)
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (4096, 16))
    data = [{"input_ids": each, "labels": each} for each in tokens]
    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
    asked = {"max_steps": 1_000_000, "per_device_train_batch_size": 2, "ddp_timeout": int(float(timeout_s))}
    args = transformers.TrainingArguments(output_dir="out", use_cpu=True, **asked, **quiet)
    model = transformers.LlamaForCausalLM(config)
    DzeroTrainer(model=model, args=args, train_dataset=data, dzero={"stage": 3}, callbacks=[Says()]).train()


if __name__ == "__main__":
    {"store": host, "loop": loop, "trainer": trainer}[sys.argv[1]](*sys.argv[2:])
