"""Runs that resume from an imported checkpoint: a loop of one's own on the ranks of a pool, and a script of Trainer.

python imported_runs.py FOLDER checkpoint-6
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from launched import as_script
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from with_deepspeed.tiny_llama import BETAS, DECAY, LR, SAVED, STEPS, batch, config

import dzero
from dzero.integrations.transformers import DzeroTrainer


def resumed_run(rank: int, ranks: int, folder: str, stage: int, offload: str, rates: list[float]) -> dict[str, Any]:
    """Resume, and train as DeepSpeed went on, with its learning rates; losses, and on rank 0 the parameters."""
    torch.manual_seed(1)  # other values than those of the checkpoint
    model = transformers.LlamaForCausalLM(config())
    sharded = dzero.shard(model, stage=stage, precision="fp32", offload=offload)
    params = [*sharded.named_params().values()]
    groups = [
        {"params": [p for p in params if (p.ndim >= 2) is matrices], "weight_decay": decay}
        for matrices, decay in ((True, DECAY), (False, 0.0))
    ]
    optim = dzero.AdamW(sharded, groups, lr=LR, betas=BETAS)
    with dzero.Checkpointer(dzero.CheckpointConfig(folder=folder), sharded, optim) as checkpoints:
        resumed = checkpoints.resume("auto")
    assert resumed is not None
    losses = []
    for step in range(SAVED, STEPS):
        for group in optim.param_groups:
            group["lr"] = rates[step - SAVED]
        tokens = batch(step, rank, ranks)
        with sharded.microbatch(is_last=True):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optim.step()
        optim.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / ranks)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {"rank": rank, "losses": losses, "params": whole, "step": resumed.step, "extra": resumed.extra}


def trainer(folder: Path, words: list[str]) -> list[dict[str, Any]]:
    """What Trainer logs of two more steps."""
    data = [{"input_ids": row, "labels": row} for row in batch(0, 0, 1).repeat(8, 1)]
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=SAVED + 2,
        learning_rate=LR / 2,
        lr_scheduler_type="constant",
        per_device_train_batch_size=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
    )
    model = transformers.LlamaForCausalLM(config())
    run = DzeroTrainer(model=model, args=args, train_dataset=data, dzero={"stage": 3})
    run.train(resume_from_checkpoint=words[0])
    return [row for row in run.state.log_history if "learning_rate" in row]


if __name__ == "__main__":
    as_script(trainer)
