"""Arguments of DzeroTrainer that are refused: `python refused_runs.py OUT` writes what each is told, by name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from trainer_runs import collate, model, samples

import dzero.integrations.transformers as integration
from dzero.integrations.transformers import DzeroTrainer

CASES: dict[str, Callable[[Path], Any]] = {}


def make(folder: Path, whole: Any = None, **given: Any) -> DzeroTrainer:
    args = {"max_steps": 1, "use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    return DzeroTrainer(
        model=whole or model(),
        args=transformers.TrainingArguments(output_dir=str(folder), **{**args, **given.pop("args", {})}),
        train_dataset=samples(8),
        eval_dataset=samples(4),
        data_collator=collate,
        **{"dzero": {"stage": 3}, **given},
    )


def case(name: str) -> Callable[[Callable[[Path], Any]], Callable[[Path], Any]]:
    return lambda function: CASES.setdefault(name, function)


for word in ("auto_find_batch_size", "bf16_full_eval", "fp16_full_eval", "save_on_each_node"):
    case(word)(lambda folder, word=word: make(folder, args={word: True}))
for kind in ("adafactor", "adamw_torch_8bit"):
    case(kind)(lambda folder, kind=kind: make(folder, args={"optim": kind}).train())
case("dzero")(lambda folder: make(folder, dzero=3))
case("stages")(lambda folder: make(folder, dzero={"stages": 3}))
case("replicate")(lambda folder: make(folder, dzero={"replicate": 3}).train())
case("both")(lambda folder: make(folder, deepspeed={}))


@case("best")
def _(folder: Path) -> Any:
    more = {"save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"}
    return make(folder, args=more)


@case("several ranks")
def _(folder: Path) -> Any:
    with patch.object(transformers.TrainingArguments, "world_size", 2):
        return make(folder, args={"enable_jit_checkpoint": True})


@case("several GPUs")
def _(folder: Path) -> Any:
    with patch.object(transformers.TrainingArguments, "n_gpu", 2):
        return make(folder)


@case("device map")
def _(folder: Path) -> Any:
    whole = model()
    whole.hf_device_map = {"model": "cuda:0", "lm_head": "cuda:1"}
    return make(folder, whole)


@case("amsgrad")
def _(folder: Path) -> Any:
    whole = model()
    return make(folder, whole, optimizers=(torch.optim.AdamW(whole.parameters(), amsgrad=True), None)).train()


@case("other model")
def _(folder: Path) -> Any:
    return make(folder, optimizers=(torch.optim.AdamW(model().parameters()), None)).train()


@case("taken steps")
def _(folder: Path) -> Any:
    whole = model()
    optim = torch.optim.AdamW(whole.parameters())
    whole(**collate(samples(2))).loss.backward()
    optim.step()
    return make(folder, whole, optimizers=(optim, None)).train()


@case("other schedule")
def _(folder: Path) -> Any:
    schedule = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model().parameters(), lr=0.1))
    return make(folder, optimizers=(None, schedule)).train()


@case("plain checkpoint")
def _(folder: Path) -> Any:
    args = transformers.TrainingArguments(str(folder), max_steps=1, save_steps=1, use_cpu=True, report_to=[])
    transformers.Trainer(model(), args, train_dataset=samples(8), data_collator=collate).train()
    return make(folder).train(resume_from_checkpoint=str(folder / "checkpoint-1"))


@case("older transformers")
def _(folder: Path) -> Any:
    library = integration.transformers  # what it has imported; transformers changes its module while it is imported
    with patch.object(library, "Trainer", object), patch.object(library, "__version__", "5.0.0"):
        return make(folder)


def main() -> None:
    out, told = Path(sys.argv[1]), {}
    for number, (name, function) in enumerate(CASES.items()):
        folder = out / str(number)
        folder.mkdir()
        try:
            function(folder)
        except (ValueError, TypeError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    (out / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
