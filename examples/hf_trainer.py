"""Fine-tune a tiny chat model with transformers' Trainer; only the marked lines are of dzero.

torchrun --nproc-per-node=2 examples/hf_trainer.py    # with transformers (extra `hf`)
"""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from dzero.integrations.transformers import DzeroTrainer  # instead of transformers' Trainer

CHATS = [(f"What is {number} plus 1?", f"It is {number + 1}.") for number in range(64)]
MASKED = -100


def sample(question: str, answer: str) -> dict[str, list[int]]:
    """Return the bytes of a chat as tokens, of which the answer's count."""
    asked, told = [*f"{question}\n".encode()], [*f"{answer}\n".encode()]
    return {"input_ids": asked + told, "labels": [MASKED] * len(asked) + told}


def collate(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad to the longest."""
    longest = max(len(each["input_ids"]) for each in samples)
    padding = {"input_ids": 0, "labels": MASKED}
    return {
        key: torch.tensor([each[key] + [value] * (longest - len(each[key])) for each in samples])
        for key, value in padding.items()
    }


def main(folder: str) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
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
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = DzeroTrainer(  # instead of Trainer
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=[sample(*each) for each in CHATS],
        data_collator=collate,
        dzero={"stage": 3, "offload": "host"},  # one more argument
    )
    trainer.train()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as out:
        main(out)
    dist.destroy_process_group()
