"""Fine-tune on chats with TRL's SFTTrainer over dzero; model, tokenizer and chats are made on the spot.

torchrun --nproc-per-node=2 examples/trl_sft.py    # with transformers (extra `hf`), and trl
"""

from __future__ import annotations

import os
import runpy
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from dzero.integrations.transformers import DzeroMixin

MAKE_MODEL = Path(__file__).parent / "finetune" / "make_model.py"
CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {number} plus 1?"},
            {"role": "assistant", "content": f"It is {number + 1}."},
        ]
    }
    for number in range(64)
]


class Trainer(DzeroMixin, SFTTrainer):
    """TRL's trainer over a model that dzero shards."""


def main(folder: Path) -> None:
    runpy.run_path(str(MAKE_MODEL))["make"](folder / "model")
    args = SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=8,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        assistant_only_loss=True,
        max_length=64,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=str(folder / "model"),
        args=args,
        train_dataset=Dataset.from_list(CHATS),
        dzero={"stage": 3, "offload": "host"},
    )
    trainer.train()


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with tempfile.TemporaryDirectory() as made:  # by each rank; a published model lies in one folder
        main(Path(made))
    dist.destroy_process_group()
