"""A Trainer's script as users write it, by plain `Trainer` or by `DzeroTrainer`: trainer_runs.py FOLDER '[RUN, ...]'.

A run gives "args" of TrainingArguments, and what DzeroTrainer takes: "dzero" or "deepspeed"; without them plain Trainer
runs. With "resume" it goes on from a checkpoint. With "real" DeepSpeed itself runs, whose losses are those of
deepspeed_losses.json (DS_ACCELERATOR=cpu torchrun --nproc-per-node=1).

Of each run there are logs, whole parameters and the best checkpoint, or what it was told.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import small_models
import torch
import transformers
from launched import as_script, whole
from torch import Tensor

SAMPLES, HELD_OUT, STEPS = 48, 16, 6


def samples(count: int) -> list[dict[str, Tensor]]:
    """Sequences of very different lengths and masks."""
    draw, found = torch.Generator().manual_seed(1), []
    for _ in range(count):
        tokens = int(torch.randint(5, 20, (1,), generator=draw))
        ids = torch.randint(3, 60, (tokens,), generator=draw)
        labels = ids.clone()
        labels[: int(torch.randint(1, tokens - 2, (1,), generator=draw))] = -100
        found.append({"input_ids": ids, "labels": labels})
    return found


def collate(batch: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest."""

    def padded(tensors: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    ids = [each["input_ids"] for each in batch]
    return {
        "input_ids": padded(ids, 0),
        "labels": padded([each["labels"] for each in batch], -100),
        "attention_mask": padded([torch.ones_like(each) for each in ids], 0),
    }


def train(folder: Path, run: dict[str, Any]) -> dict[str, Any]:
    args: dict[str, Any] = {"max_steps": STEPS, "logging_steps": 1, "seed": 3, **run.get("args", {})}
    over = {key: run[key] for key in ("dzero", "deepspeed") if key in run}
    if run.get("real"):
        args |= over
        over = {}
    args = {**args, "output_dir": str(folder), "report_to": [], "use_cpu": True, "disable_tqdm": True}
    given = {
        "model": small_models.llama(),
        "args": transformers.TrainingArguments(**args),
        "train_dataset": samples(SAMPLES),
        "eval_dataset": samples(HELD_OUT),
        "data_collator": collate,
    }
    if over:
        from dzero.integrations.transformers import DzeroTrainer

        trainer = DzeroTrainer(**given, **over)
    else:
        trainer = transformers.Trainer(**given)
    trainer.train(resume_from_checkpoint=run.get("resume"))
    trainer.save_model()
    logged = ("loss", "grad_norm", "learning_rate", "eval_loss")
    logs = [{key: row[key] for key in logged if key in row} for row in trainer.state.log_history]
    params = {name: whole(param).detach().tolist() for name, param in trainer.model.named_parameters()}
    return {"logs": logs, "params": params, "best": trainer.state.best_model_checkpoint}


def trained_or_told(folder: Path, runs: list[dict[str, Any]]) -> list[Any]:
    found: list[Any] = []
    for number, run in enumerate(runs):
        try:
            found.append(train(folder / str(number), run))
        except (ValueError, TypeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


if __name__ == "__main__":
    as_script(lambda folder, words: trained_or_told(folder, json.loads(words[0])))
