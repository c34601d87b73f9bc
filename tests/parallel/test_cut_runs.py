"""train.py over ranks that share sequences, layers, matrices or experts: the losses of a run that is not cut."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from pool import Pool
from small_runs import Told, settled, train, write_text

FP32 = 1e-5
LINES = [
    "mesh.cp=2 zero.stage=3 precision=fp32 train.accumulate=2",
    "mesh.pp=2 zero.stage=1 precision=fp32 train.accumulate=2 model=tiny_moe model.layers=4 model.balance=loss "
    "mesh.pp_schedule=interleaved",
    "mesh.pp=2 mesh.tp=2 zero.stage=1 precision=fp32 model.kv_heads=2 train.accumulate=2 model.tied=true "
    "block.loss_tiles=3",
]
MORE = [
    "mesh.dp=2 mesh.pp=2 zero.stage=1 precision=fp32 train.accumulate=2 model=tiny_moe model.layers=4 "
    "model.balance=loss mesh.ep=2 mesh.pp_schedule=interleaved",
    "mesh.cp=2 zero.stage=2 precision=bf16 mesh.cp_attention=ulysses model.kv_heads=2 block.activation_checkpoint=full",
    "mesh.cp=2 mesh.tp=2 zero.stage=1 precision=fp32 model.kv_heads=2 block.loss_tiles=3",
    "mesh.cp=2 zero.stage=2 precision=fp32 block.compile=true",
    "mesh.cp=2 mesh.cp_attention=ring zero.stage=3 precision=bf16 model.kv_heads=1 train.accumulate=2",
    "mesh.pp=2 mesh.cp=2 zero.stage=2 precision=fp32 train.accumulate=3 block.activation_checkpoint=full",
    "mesh.dp=2 mesh.pp=2 zero.stage=2 precision=bf16 train.accumulate=2 offload=host offload.overlap=forward",
    "mesh.pp=2 zero.stage=0 precision=fp16 train.accumulate=2 model=tiny_moe model.balance=loss model.balance_rate=1.0",
    "mesh.pp=2 precision=fp32 train.accumulate=2 mesh.pp_schedule=zero_bubble model.layers=4 block.loss_tiles=3",
    "mesh.tp=2 zero.stage=3 precision=fp32 model.kv_heads=2 block.loss_tiles=3 block.compile=true",
    "mesh.dp=2 mesh.tp=2 zero.stage=3 precision=bf16 model.kv_heads=2 block.activation_checkpoint=full",
    "mesh.tp=2 precision.compute=fp8_rowwise model.hidden_size=64 model.ffn_size=64 model.kv_heads=2",
    "mesh.tp=2 precision.compute=fp8_tensorwise model.hidden_size=64 model.ffn_size=64 model.kv_heads=2",
]
CHEAPER = "tests/parallel/test_cut_runs.py::test_a_run_has_the_losses_of_one_that_is_not_cut_and_the_traffic_of_theory"


def told_by(pool: Pool, text: Path, settings: list[str]) -> list[Told]:
    run = settled(text, *settings)
    mesh = run.mesh
    ranks = prod((mesh.dp or 1, mesh.cp, mesh.tp, mesh.pp))
    told: list[Told] = pool.run(train, ranks, run, text.parent / f"run of {ranks}", timeout_s=300)
    return told


def check(pool: Pool, tmp_path: Path, line: str) -> None:
    text = write_text(tmp_path / "text.txt")
    settings = ["train.steps=2", "train.evaluate_every_steps=2", *line.split()]
    alone = [each for each in settings if not each.startswith(("mesh.cp", "mesh.tp", "mesh.pp", "mesh.ep", "block."))]
    cut, (want, *_) = told_by(pool, text, settings), told_by(pool, text, alone)
    for each in cut:
        assert each.agrees
        for key in ("cp", "tp", "pp"):
            is_counted = (PHASES[key] in each.phases) == (f"mesh.{key}=2" in line)
            assert is_counted or "model=hf" in line or "compile=true" in line  # for which there is no theory
        assert each.losses == pytest.approx(want.losses, rel=FP32 if "fp32" in line else 2e-2)
        assert each.held_out == pytest.approx(want.held_out, rel=FP32 if "fp32" in line else 2e-2)


PHASES = {"cp": "context", "tp": "tensor", "pp": "pipeline"}


@pytest.mark.parametrize("line", [*LINES, *(pytest.param(line, marks=pytest.mark.full(CHEAPER)) for line in MORE)])
def test_a_run_has_the_losses_of_one_that_is_not_cut_and_the_traffic_of_theory(
    pool: Pool, tmp_path: Path, line: str
) -> None:
    check(pool, tmp_path, line)


def going_on(tmp_path: Path) -> list[str]:
    """Settings by which every step is of the same 4 sequences, and every second one is saved."""
    settings = ["precision=fp32", "train.global_sequences=4", "train.accumulate=null", "train.evaluate_batches=0"]
    settings += ["schedule.kind=constant", "schedule.warmup_steps=0", "train.microbatch_sequences=1", "resume=auto"]
    return [*settings, "checkpoint.every=1", f"checkpoint.folder={tmp_path / 'saved'}"]


def test_a_run_goes_on_over_other_axes_and_back(pool: Pool, tmp_path: Path) -> None:
    """The rate that tied parameters share goes with them; each part counts its traffic in its own first step."""
    text = write_text(tmp_path / "text.txt")
    settings = ["model.tied=true", "model.layers=4", "model.kv_heads=2"]
    want = told_by(pool, text, [*going_on(tmp_path / "whole"), *settings, "train.steps=4"])[0].losses
    losses = []
    for steps, mesh in enumerate(("mesh.cp=2", "mesh.pp=2", "mesh.tp=2", "mesh.dp=1"), start=1):
        told = told_by(pool, text, [*going_on(tmp_path), *settings, f"train.steps={steps}", mesh])
        assert all(each.agrees for each in told)
        losses += told[0].losses
    assert losses == pytest.approx(want, rel=FP32)


def of_transformers(folder: Path, kind: str, **sizes: Any) -> list[str]:
    """Settings of a small model of transformers that reads bytes."""
    dense = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "head_dim": 8, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    given = sizes if kind == "gpt2" else {**dense, **heads, **sizes}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **given}))
    unset = [f"model.{key}=null" for key in ("hidden_size", "layers", "heads", "kv_heads", "ffn_size")]
    return ["model=hf", f"model.name_or_path={folder}", "precision=fp32", *unset]


def test_a_model_with_dropout_goes_on_over_other_axes(pool: Pool, tmp_path: Path) -> None:
    """Two ranks read samples of their own and draw their own masks; then both see the same, and must draw the same."""
    sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    settings = of_transformers(tmp_path, "gpt2", **sizes, attn_pdrop=0.1, resid_pdrop=0.1)
    text = write_text(tmp_path / "text.txt")
    often = [told_by(pool, text, [*settings, "train.steps=2", f"train.evaluate_every_steps={n}"]) for n in (1, 2)]
    assert often[0][0].losses == often[1][0].losses  # an evaluation leaves the masks as they are
    settings += going_on(tmp_path)
    for steps, mesh in ((1, "mesh.dp=2"), (2, "mesh.tp=2")):
        told = told_by(pool, text, [*settings, f"train.steps={steps}", mesh])
        assert told[0].losses == told[1].losses
        assert len(told[0].losses) == 1


def test_a_model_of_transformers_is_cut_too(pool: Pool, tmp_path: Path) -> None:
    """Along layers; its sequences are cut in test_context_hf.py."""
    check(pool, tmp_path, " ".join([*of_transformers(tmp_path, "qwen3"), "mesh.pp=2 zero.stage=2 train.accumulate=2"]))
