"""A Trainer's script as users write it, run by plain `Trainer` in one process or by `DzeroTrainer` under torchrun.

    python trainer_runs.py OUT                          plain
    torchrun --nproc-per-node=2 trainer_runs.py OUT '[{"stage": 3}, ...]'   each of these settings in turn

With a last word `adapters`, LoRA's matrices are trained alone.

Arguments of Trainer for one run are under "args" of its settings, and a checkpoint to go on from under "resume".

Logs, whole weights and the best checkpoint of each run are written to OUT/results.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

SAMPLES, HELD_OUT, BATCH, ACCUMULATE, STEPS = 48, 16, 4, 4, 6
MIDDLE = 2
"""A step in the middle of an epoch of three steps, after which a checkpoint is resumed from."""


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


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        max_position_embeddings=64,
    )
    made = transformers.LlamaForCausalLM(config)
    if sys.argv[-1] != "adapters":
        return made
    import peft

    return peft.get_peft_model(made, peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


def train(folder: Path, settings: dict[str, Any] | None, resume: Path | None = None) -> dict[str, Any]:
    """Clipping bites, the schedule warms up, and the best model is loaded at the end."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    settings = None if settings is None else dict(settings)
    more = settings.pop("args", {}) if settings else {}
    resume = settings.pop("resume", resume) if settings else resume
    kept: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": STEPS,
        "per_device_train_batch_size": BATCH // ranks,
        "per_device_eval_batch_size": BATCH // ranks,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": MIDDLE,
        "save_steps": MIDDLE,
        "load_best_model_at_end": True,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "data_seed": 3,
    }
    args = transformers.TrainingArguments(**{**kept, **more})
    given: dict[str, Any] = {
        "model": model(),
        "args": args,
        "train_dataset": samples(SAMPLES),
        "eval_dataset": samples(HELD_OUT),
        "data_collator": collate,
    }
    if settings is None:
        trainer = transformers.Trainer(**given)
    else:
        from dzero.integrations.transformers import DzeroTrainer

        trainer = DzeroTrainer(**given, dzero=settings)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model()
    logged = ("loss", "grad_norm", "learning_rate", "eval_loss")
    logs = [{key: row[key] for key in logged if key in row} for row in trainer.state.log_history]
    params = {
        name: (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().tolist()
        for name, param in trainer.model.named_parameters()
    }
    return {"logs": logs, "params": params, "best": trainer.state.best_model_checkpoint}


def main() -> None:
    torch.set_num_threads(1)
    given = [word for word in sys.argv[2:] if word != "adapters"]
    out, runs = Path(sys.argv[1]), json.loads(given[0]) if given else [None]
    if given:
        dist.init_process_group("gloo")
    found = [train(out / str(number), settings) for number, settings in enumerate(runs)]
    if given:
        found.append(train(out / "resumed", runs[0], resume=out / "0" / f"checkpoint-{MIDDLE}"))
    if not dist.is_initialized() or dist.get_rank() == 0:
        (out / "results.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
