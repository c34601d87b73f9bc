"""TRL's trainers alone and over dzero, ten steps each: `python trl_runs.py MODEL OUT` writes the losses of all four."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl

from dzero.integrations.transformers import DzeroMixin

STEPS = 10


class DzeroSFT(DzeroMixin, trl.SFTTrainer):
    """Supervised fine-tuning."""


class DzeroDPO(DzeroMixin, trl.DPOTrainer):
    """Direct preference optimization."""


QUESTIONS = [(f"What is {number} plus 1?", str(number + 1), str(number)) for number in range(32)]
CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer, _ in QUESTIONS
]
PAIRS = [{"prompt": question, "chosen": right, "rejected": wrong} for question, right, wrong in QUESTIONS]


def losses(trainer: type[Any], config: type[Any], rows: list[dict[str, Any]], folder: Path, **more: Any) -> list[float]:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    args = config(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        max_length=64,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1])
    data = datasets.Dataset.from_list(rows)
    made = trainer(model=model, args=args, train_dataset=data, processing_class=tokenizer, **more)
    made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def main() -> None:
    torch.set_num_threads(1)
    out, over = Path(sys.argv[2]), {"dzero": {"stage": 3, "offload": "host"}}
    found = {
        "sft": losses(trl.SFTTrainer, trl.SFTConfig, CHATS, out),
        "dzero sft": losses(DzeroSFT, trl.SFTConfig, CHATS, out, **over),
        "dpo": losses(trl.DPOTrainer, trl.DPOConfig, PAIRS, out),
        "dzero dpo": losses(DzeroDPO, trl.DPOConfig, PAIRS, out, **over),
    }
    (out / "losses.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
