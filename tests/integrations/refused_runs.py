"""What DzeroTrainer is given and refuses: `refused_runs.py FOLDER '[RUN, ...]'`, runs as in trainer_runs.py.

Of each run there is what it was told, and so of each case below by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from launched import as_script
from small_models import llama
from trainer_runs import collate, samples, trained_or_told

import dzero.integrations.transformers as integration

AdamW = torch.optim.AdamW


def make(folder: Path, whole: Any = None, args: dict[str, Any] | None = None, **given: Any) -> Any:
    kept = {"max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    data = {"train_dataset": samples(8), "data_collator": collate, "dzero": {"stage": 3}}
    made = transformers.TrainingArguments(output_dir=str(folder), **kept, **(args or {}))
    return integration.DzeroTrainer(model=whole or llama(), args=made, **data, **given)


def several_ranks(folder: Path) -> None:
    with patch.object(transformers.TrainingArguments, "world_size", 2):
        make(folder, args={"enable_jit_checkpoint": True})


def several_gpus(folder: Path) -> None:
    with patch.object(transformers.TrainingArguments, "n_gpu", 2):
        make(folder)


def device_map(folder: Path) -> None:
    whole = llama()
    whole.hf_device_map = {"model": "cuda:0", "lm_head": "cuda:1"}
    make(folder, whole)


def amsgrad(folder: Path) -> None:
    whole = llama()
    make(folder, whole, optimizers=(AdamW(whole.parameters(), amsgrad=True), None)).train()


def other_model(folder: Path) -> None:
    make(folder, optimizers=(AdamW(llama().parameters()), None)).train()


def taken_steps(folder: Path) -> None:
    whole = llama()
    optim = AdamW(whole.parameters())
    whole(**collate(samples(2))).loss.backward()
    optim.step()
    make(folder, whole, optimizers=(optim, None)).train()


def other_schedule(folder: Path) -> None:
    schedule = torch.optim.lr_scheduler.ConstantLR(AdamW(llama().parameters()))
    make(folder, optimizers=(None, schedule)).train()


def older_transformers(folder: Path) -> None:
    library = integration.transformers  # what it has imported; transformers changes its module while it is imported
    with patch.object(library, "Trainer", object), patch.object(library, "__version__", "5.0.0"):
        make(folder)


CASES: tuple[Callable[[Path], None], ...] = (several_ranks, several_gpus, device_map, amsgrad, other_model)
CASES += (taken_steps, other_schedule, older_transformers)


def main(folder: Path, words: list[str]) -> dict[str, Any]:
    cases = {}
    for case in CASES:
        try:
            case(folder / case.__name__)
        except (ValueError, RuntimeError) as error:
            cases[case.__name__] = f"{type(error).__name__}: {error}"
    return {"runs": trained_or_told(folder, json.loads(words[0])), "cases": cases}


if __name__ == "__main__":
    as_script(main)
