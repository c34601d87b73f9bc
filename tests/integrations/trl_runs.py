"""TRL's trainers alone and over dzero, ten steps each, by torchrun, where TRL alone is DDP: trl_runs.py OUT MODEL.

OUT/results.json has the losses of both sides, by case.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from launched import as_script, is_first, wait_for_all

import dzero
from dzero.integrations.transformers import DzeroMixin

STEPS = 10
QUESTIONS = [(f"What is {number} plus 1?", str(number + 1), str(number)) for number in range(32)]
CHATS = [
    {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    for question, answer, _ in QUESTIONS
]
PROMPTS = [{"prompt": question} for question, *_ in QUESTIONS]
PAIRS = [{"prompt": question, "chosen": right, "rejected": wrong} for question, right, wrong in QUESTIONS]


def model(of: str = "AutoModelForCausalLM", **given: Any) -> Any:
    return getattr(transformers, of).from_pretrained(sys.argv[2], dtype=torch.float32, **given)


def reference() -> Any:
    """Return a reference that is not where the policy begins."""
    torch.manual_seed(5)
    made = model()
    with torch.no_grad():
        for param in made.parameters():
            param.add_(0.01 * torch.randn_like(param))
    return made


def adapted() -> dict[str, Any]:
    import peft

    return {"peft_config": peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])}


def sharded_reference() -> dict[str, Any]:
    return {"ref_model": dzero.shard(reference(), stage=3, precision="fp32").model}


def scored() -> dict[str, Any]:
    return {"reward_funcs": lambda completions, **_: [sum(map(ord, each[:5])) % 17 / 17 for each in completions]}


SFT, DPO = (trl.SFTTrainer, trl.SFTConfig, CHATS), (trl.DPOTrainer, trl.DPOConfig, PAIRS)
CASES: dict[str, Any] = {
    "sft": (*SFT, {}, dict),
    "sft, assistant only": (*SFT, {"assistant_only_loss": True}, dict),
    "sft, packing": (*SFT, {"packing": True, "packing_strategy": "wrapped"}, dict),
    "sft, adapters": (*SFT, {}, adapted),
    "dpo": (*DPO, {}, dict),
    "dpo, reference": (*DPO, {}, lambda: {"ref_model": reference()}),
    "dpo, sharded reference": (*DPO, {}, lambda: {"ref_model": reference()}),
    "dpo, precomputed": (*DPO, {"precompute_ref_log_probs": True}, dict),
    "dpo, adapters": (*DPO, {}, adapted),
    "grpo": (trl.GRPOTrainer, trl.GRPOConfig, PROMPTS, {"num_generations": 4, "max_completion_length": 12}, scored),
    "reward": (trl.RewardTrainer, trl.RewardConfig, PAIRS, {}, dict),
}
"""By name: trainer, class of its arguments, rows, arguments, and a function that makes what else the trainer takes."""


def on_disk(rows: list[dict[str, Any]], folder: Path) -> Any:
    """Return a data set that all ranks read from one folder, beside which TRL keeps what it computes once."""
    if is_first() and not folder.exists():
        datasets.Dataset.from_list(rows).save_to_disk(folder)
    wait_for_all()
    return datasets.load_from_disk(folder)


def losses(case: str, folder: Path, **over: Any) -> list[float]:
    trainer, config, rows, asked, more = CASES[case]
    args = config(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **({} if case == "grpo" else {"max_length": 64}),
        **asked,
    )
    transformers.set_seed(1)
    whole = model("AutoModelForSequenceClassification", num_labels=1) if case == "reward" else model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[2])
    kind = type("Over", (DzeroMixin, trainer), {}) if over else trainer
    data = on_disk(rows, folder / f"{case} {bool(over)}")
    given = sharded_reference() if over and case == "dpo, sharded reference" else more()
    made = kind(model=whole, args=args, train_dataset=data, processing_class=tokenizer, **given, **over)
    made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row]


def told_of_a_synced_reference(folder: Path) -> str:
    """Return why dzero refuses a reference that TRL would update from the policy's parameters."""
    args = trl.DPOConfig(output_dir=str(folder), sync_ref_model=True, bf16=False, use_cpu=True, report_to=[])
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[2])
    kind, data = type("Over", (DzeroMixin, trl.DPOTrainer), {}), on_disk(PAIRS, folder / "synced")
    try:
        kind(model=model(), args=args, train_dataset=data, processing_class=tokenizer, dzero={"stage": 3})
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path, words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"told": told_of_a_synced_reference(folder)}
    for case in CASES:
        print(case, flush=True)
        alone = losses(case, folder)
        found[case] = {"alone": alone, "dzero": losses(case, folder, dzero={"stage": 3, "offload": "host"})}
    return found


if __name__ == "__main__":
    as_script(main)
