"""What was trained of a model of peft is what its folders hold: peft and transformers load the trained logits.

The rows of docs/reference/adapters.md are what the test walks. The oracle loads a folder without dzero.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pool import Pool
from torch import Tensor, nn

import dzero
from dzero.integrations.transformers import DzeroTrainer

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
PAGE = Path(__file__).parents[2] / "docs/reference/adapters.md"
STEPS, LR, VOCAB = 2, 2e-2, 61
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "mixture": {"num_local_experts": 4, "num_experts_per_tok": 2},
}


class Row(NamedTuple):
    """A row of the page: settings of peft as a call, the kind of model, and which folders it has."""

    call: str
    model: str
    alone: bool
    merged: bool

    @property
    def settings(self) -> dict[str, Any]:
        (call,) = (node for node in ast.walk(ast.parse(self.call)) if isinstance(node, ast.Call))
        return {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}

    def config(self) -> Any:
        kind = getattr(peft, self.call.partition("(")[0])
        names = {each.name for each in fields(kind)}
        default = {"target_modules": ["q_proj", "down_proj"]} if "target_modules" in names else {}
        if kind is peft.AdaptionPromptConfig:  # which finds its own
            default = {}
        return kind(task_type="CAUSAL_LM", **default | self.settings)


def rows(title: str) -> list[Row]:
    section = PAGE.read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if "Config(" in line]
    assert all({alone, merged} <= {"yes", "no"} for _, _, alone, merged in cells)
    return [Row(call.strip("`"), kind, alone == "yes", merged == "yes") for call, kind, alone, merged in cells]


LORA, OTHERS = rows("LoRA"), rows("Other methods")
LOOP = "tests/trainer/test_adapters_out.py::test_a_loop_of_ones_own_leaves_what_it_trained"
USUAL = ("LoraConfig(r=2)", "ensure_weight_tying", "target_parameters", "pissa", "IA3", "PromptTuning", "AdaLora")
"""Rows that are tried in every run of the tests: a kind of adapter each."""


def case(row: Row, *, is_usual: bool) -> Any:
    """A member of the test; what the installed peft does not offer is skipped."""
    kind = row.call.partition("(")[0]
    missing = pytest.mark.skipif(not hasattr(peft, kind), reason=f"peft {peft.__version__} has no {kind}")
    marks = [missing] if is_usual else [missing, pytest.mark.full(LOOP)]
    return pytest.param(row, id=f"{row.call}-{row.model}", marks=marks)


def always(row: Row) -> Any:
    return case(row, is_usual=any(map(row.call.count, USUAL)))


def sometimes(row: Row) -> Any:
    named = ("ensure_weight_tying", "PromptTuning")
    return case(row, is_usual=any(map(repr(row).count, named)))


def tokens() -> Tensor:
    """Sequences that have the tokens which rows of the page name."""
    ids = torch.randint(VOCAB, (2, 8), generator=torch.Generator().manual_seed(1))
    ids[:, 1:5] = torch.tensor([2, 5, 1, 2])
    return ids


def base(folder: Path, kind: str) -> Path:
    """The folder of an untrained model."""
    torch.manual_seed(0)
    name = "mixtral" if kind == "mixture" else "llama"
    config = transformers.AutoConfig.for_model(name, **SIZES, **MODELS[kind])
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    return folder / "base"


def loaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    model.eval()
    found = model(tokens())
    found = found if isinstance(found, Tensor) else found.logits
    return found[:, -tokens().shape[1] :].clone()


def adapted(folder: Path, row: Row) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(loaded(folder / "base"), row.config())


def own_loop(rank: int, ranks: int, row: Row, folder: Path) -> dict[str, Any]:
    """Train in a loop, write what the row has, and return logits and what is refused."""
    built = adapted(folder, row)
    told: dict[str, Any] = {"before": logits(built)}
    if not (row.alone or row.merged):
        with pytest.raises(ValueError) as lost:  # noqa: PT011  # its text is looked at by the test
            dzero.shard(built, stage=3, precision="fp32")
        return told | {"refused": str(lost.value)}
    sharded = dzero.shard(built, stage=3, precision="fp32")
    optim = dzero.AdamW(sharded, lr=LR)
    for _ in range(STEPS):
        found = sharded.model(tokens()).logits[:, -tokens().shape[1] : -1]
        nn.functional.cross_entropy(found.flatten(0, 1), tokens()[:, 1:].flatten()).backward()
        optim.step()
        optim.zero_grad()
    for form, is_written in (("alone", row.alone), ("merged", row.merged)):
        if is_written:
            dzero.save_pretrained(sharded, folder / form, merge=form == "merged")
        else:
            with pytest.raises(ValueError) as refused:  # noqa: PT011
                dzero.save_pretrained(sharded, folder / form, merge=form == "merged")
            told["refused"] = str(refused.value)
    return told | {"after": logits(sharded.model)}


def by_trainer(rank: int, ranks: int, row: Row, folder: Path) -> dict[str, Any]:
    """Train by DzeroTrainer, whose checkpoint holds the adapter alone; refused before training if it cannot."""
    told: dict[str, Any] = {"before": logits(adapted(folder, row))}

    def trainer(save_strategy: str) -> Any:
        args = transformers.TrainingArguments(
            output_dir=str(folder / "run"),
            max_steps=STEPS,
            per_device_train_batch_size=1,
            learning_rate=LR,
            save_strategy=save_strategy,
            save_steps=STEPS,
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
        )
        data = [{"input_ids": ids, "labels": ids} for ids in tokens()]
        return DzeroTrainer(model=adapted(folder, row), args=args, train_dataset=data, dzero={"stage": 2})

    if not (row.alone or row.merged):
        with pytest.raises(ValueError) as lost:  # noqa: PT011
            trainer("steps").train()
        return told | {"refused": str(lost.value)}
    if not row.alone:
        with pytest.raises(ValueError, match=r"DzeroTrainer with save_strategy='steps'") as refused:
            trainer("steps")
        told["refused"] = str(refused.value)
    trained = trainer("steps" if row.alone else "no")
    trained.train()
    if row.alone and rank == 0:
        (folder / "run" / f"checkpoint-{STEPS}").rename(folder / "alone")
    if row.merged:
        dzero.save_pretrained(trained.sharded, folder / "merged", merge=True)
    return told | {"after": logits(trained.sharded.model)}


def compare(row: Row, folder: Path, told: list[dict[str, Any]], *, refused: bool) -> None:
    """Load the folders that a row has, and compare logits; every rank was told why it has no other."""
    for found in told:
        assert ("refused" in found) == refused
        assert "\n" not in found.get("refused", "")
    if row.alone or row.merged:
        want = told[0]["after"]
        assert (want - told[0]["before"]).abs().max() > 3e-5, "training changes logits"
    forms = {"alone": row.alone, "merged": row.merged}
    assert {each.name for each in folder.iterdir()} & forms.keys() == {form for form in forms if forms[form]}
    if row.alone:
        found = peft.PeftModel.from_pretrained(loaded(folder / "base"), folder / "alone")
        torch.testing.assert_close(logits(found), want, rtol=0, atol=1e-6)
    if row.merged:
        found, info = transformers.AutoModelForCausalLM.from_pretrained(folder / "merged", output_loading_info=True)
        assert not any(info.values()), info
        torch.testing.assert_close(logits(found), want, rtol=0, atol=1e-6)
        assert (folder / "merged" / "generation_config.json").exists()


@pytest.mark.parametrize("row", [always(row) for row in (*LORA, *OTHERS)])
def test_a_loop_of_ones_own_leaves_what_it_trained(pool: Pool, tmp_path: Path, row: Row) -> None:
    base(tmp_path, row.model)
    told = pool.run(own_loop, 2, row, tmp_path)
    compare(row, tmp_path, told, refused=not (row.alone and row.merged))


@pytest.mark.parametrize("row", [sometimes(row) for row in (*LORA, *OTHERS)])
def test_a_trainer_leaves_what_it_trained(pool: Pool, tmp_path: Path, row: Row) -> None:
    base(tmp_path, row.model)
    compare(row, tmp_path, pool.run(by_trainer, 1, row, tmp_path), refused=not row.alone)
