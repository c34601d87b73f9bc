"""QLoRA: plain peft on the values that 8 or 4 bits stand for, the same bits everywhere, and what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import dzero as command
from pool import Pool, WorkerError
from small_runs import CONF
from test_finetune import model as model
from test_finetune import words
from test_lora import LORA, RULES, adapters, oracle, ran, rested, trained

from dzero import save_pretrained
from dzero.overrides import composed
from dzero.trainer.trainer import Trainer
from dzero.zero.quantized_weights import CODECS

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

QLORA = ["adapter=qlora", *LORA[1:], "precision.param=fp32"]
QLORA.remove("precision=fp32")  # a preset that would take the place of adapter=qlora's


def decoded(folder: Path, kind: str, to: Path) -> Path:
    """A copy of a published model whose quantized matrices have the values that they stand for."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    codec = CODECS[kind]
    for layer in model.model.layers.modules():
        if isinstance(layer, torch.nn.Linear):
            codec.decode(codec.encode(layer.weight.data), layer.weight.data)
    model.save_pretrained(to)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(to)
    return to


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.full)])
def test_steps_are_those_of_peft_on_the_decoded_model(pool: Pool, model: Path, tmp_path: Path, kind: str) -> None:
    def run(ranks: int, *settings: str) -> dict[str, Any]:
        line = words(model, tmp_path, *QLORA, *RULES["SGD"], f"precision.frozen={kind}", *settings)
        return pool.run(trained, ranks, line, tmp_path)[0]

    first = run(2, "zero.stage=3", "train.microbatch_sequences=16")
    want = oracle(decoded(model, kind, tmp_path / "decoded"), first["first"], "SGD")
    plain = oracle(model, first["first"], "SGD")
    assert abs(want["losses"][0] - plain["losses"][0]) > 1e-5, "quantization shows"
    others = [
        run(2, "zero.stage=3", "train.microbatch_sequences=16", *more)
        for more in (
            ["zero.stage=0"],
            ["offload.frozen=host", "block.activation_checkpoint=full"],
            ["offload=host_all"],
        )
    ]
    for other in others:
        assert other["losses"] == first["losses"]
        assert all(torch.equal(value, first["last"][name]) for name, value in other["last"].items())
    for each in (first, run(1, "zero.stage=3", "train.microbatch_sequences=32")):
        assert each["losses"] == pytest.approx(want["losses"], rel=1e-6)
        for name, value in want["last"].items():
            torch.testing.assert_close(each["last"][name], value, rtol=0, atol=1e-6)


def exported(rank: int, ranks: int, settings: list[str], folder: Path) -> dict[str, torch.Tensor]:
    trainer = Trainer(composed(settings, CONF), folder, torch.device("cpu"))
    trainer.run()
    save_pretrained(trainer.sharded, folder / "merged", merge=True)
    return adapters(trainer)


def test_what_is_merged_is_the_model_that_was_trained(pool: Pool, model: Path, tmp_path: Path) -> None:
    settings = [each for each in QLORA if not each.startswith("export.")]
    saved = ["checkpoint.every=3", f"checkpoint.folder={tmp_path / 'saved'}"]
    made = pool.run(exported, 2, words(model, tmp_path, *settings, *saved, "zero.stage=3"), tmp_path)[0]
    base = transformers.AutoModelForCausalLM.from_pretrained(decoded(model, "nf4", tmp_path / "decoded"))
    tuned = peft.PeftModel.from_pretrained(base, tmp_path / "model")
    assert all(torch.equal(dict(tuned.named_parameters())[name], value) for name, value in made.items())
    want = tuned.merge_and_unload().state_dict()
    done = command("export", tmp_path / "saved", tmp_path / "of the checkpoint", "--merge", "--dtype=fp32")
    assert done.returncode == 0, done.stderr
    for folder in ("merged", "of the checkpoint"):
        found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto").state_dict()
        assert found.keys() == want.keys()
        assert all(torch.equal(value, want[name]) for name, value in found.items())


@pytest.mark.parametrize(("kind", "per_block"), [("int8", 66), ("nf4", 34)])
def test_the_run_holds_and_moves_the_bytes_of_the_formula(
    pool: Pool, model: Path, tmp_path: Path, kind: str, per_block: int
) -> None:
    line = words(model, tmp_path, *QLORA, "precision.param=bf16", f"precision.frozen={kind}", "zero.stage=3")
    sizes = [
        (param.numel(), "layers" in name and param.ndim == 2)
        for name, param in transformers.AutoModelForCausalLM.from_pretrained(model).named_parameters()
    ]
    frozen = sum(elems * per_block // 64 if quantized else 2 * elems for elems, quantized in sizes) // 2
    for found in pool.run(rested, 2, line, tmp_path):
        assert found["held"]["frozen"] == found["foreseen"].frozen == frozen
        assert found["agrees"]


def test_a_run_resumes_with_the_same_bits_and_not_beside_other_values(pool: Pool, model: Path, tmp_path: Path) -> None:
    def run(steps: int, name: str, *settings: str, ranks: int = 2) -> dict[str, torch.Tensor]:
        kept = [each for each in QLORA if not each.startswith(("train.epochs", "schedule.warmup"))]
        line = words(model, tmp_path, *kept, "optim.lr=1e-2", "zero.stage=3", "train.epochs=null", *settings)
        line += [f"train.steps={steps}", "checkpoint.every=2", f"checkpoint.folder={tmp_path / name}"]
        return pool.run(ran, ranks, line, tmp_path / f"run {name}")[0]

    whole_run = run(4, "whole")
    run(2, "halves")
    with pytest.raises(WorkerError, match=r"belong to another model .*: precision.frozen was nf4, is int8; take"):
        run(4, "halves", "resume=auto", "precision.frozen=int8")
    with pytest.raises(WorkerError, match=r"with precision.frozen=nf4, precision.param was fp32, is bf16; take"):
        run(4, "halves", "resume=auto", "precision.param=bf16")
    resumed = run(4, "halves", "resume=auto", "offload.frozen=host")
    assert all(torch.equal(value, resumed[name]) for name, value in whole_run.items())
