"""Train with the ds_config.json of a DeepSpeed run, unchanged.

torchrun --nproc-per-node=2 examples/from_deepspeed/train.py    # with transformers (extra `hf`)

The run that it replaces is this script with two other lines, started by `deepspeed --num_gpus=2`:

    args = TrainingArguments(..., deepspeed="ds_config.json")    # here the file goes to DzeroTrainer
    trainer = Trainer(model=model, args=args, ...)

`dzero from-deepspeed examples/from_deepspeed/ds_config.json` says what becomes of each key.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, default_data_collator

from dzero.integrations.transformers import DzeroTrainer

SETTINGS = Path(__file__).with_name("ds_config.json")
VOCAB, TOKENS, SAMPLES = 64, 16, 64


def counting() -> list[dict[str, list[int]]]:
    """Return sequences that count up from different numbers."""
    rows = [[(first + position) % VOCAB for position in range(TOKENS)] for first in range(SAMPLES)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    args = TrainingArguments(
        output_dir=folder,
        num_train_epochs=2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        warmup_steps=2,
        bf16=True,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = DzeroTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=counting(),
        data_collator=default_data_collator,
        deepspeed=SETTINGS,
    )
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out:
        main(out)
    dist.destroy_process_group()
