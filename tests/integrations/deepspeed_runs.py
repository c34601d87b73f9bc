"""Trainer or DzeroTrainer with a DeepSpeed configuration: what is logged at each step of each run.

    python deepspeed_runs.py OUT '[{"args": {...}, "deepspeed": {...}}, ...]'

Without "deepspeed", plain Trainer runs. With "real": true, DeepSpeed itself runs, beside which this prints the losses
that test_deepspeed_trainer.py compares with (DS_ACCELERATOR=cpu torchrun --nproc-per-node=1 deepspeed_runs.py ...).
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import trainer_runs
import transformers

STEPS = 6


def train(folder: Path, run: dict[str, Any]) -> list[dict[str, float]]:
    """Return loss, norm and rate of each step."""
    more = {"deepspeed": run["deepspeed"]} if run.get("real") else {}
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, **run["args"], **more}
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        logging_steps=1,
        save_steps=STEPS // 2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **settings,
    )
    given: dict[str, Any] = {
        "model": trainer_runs.model(),
        "args": args,
        "train_dataset": trainer_runs.samples(48),
        "data_collator": trainer_runs.collate,
    }
    if more or "deepspeed" not in run:
        trainer = transformers.Trainer(**given)
    else:
        from dzero.integrations.transformers import DzeroTrainer

        trainer = DzeroTrainer(**given, **{key: run[key] for key in ("deepspeed", "dzero") if key in run})
    trainer.train(resume_from_checkpoint=run.get("resume"))
    kept = ("loss", "grad_norm", "learning_rate")
    return [{key: row[key] for key in kept} for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    torch.set_num_threads(1)
    out, runs = Path(sys.argv[1]), json.loads(sys.argv[2])
    found: list[Any] = []
    for number, run in enumerate(runs):
        try:
            found.append(train(out / str(number), run))
        except (ValueError, TypeError) as error:
            found.append(str(error))
    if os.environ.get("RANK", "0") == "0":
        (out / "results.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
