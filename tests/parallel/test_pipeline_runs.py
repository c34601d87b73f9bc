"""train.py over the ranks of a pipeline: the losses of a run without one, alone and beside every other axis."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import Pool
from small_runs import settled, train, write_text

from dzero.plan.run_layout import workers_of

FP32 = 1e-5
LINES = [
    "mesh.pp=2 zero.stage=3 precision=fp32 train.accumulate=2 model.layers=3",
    "mesh.pp=2 mesh.cp=2 zero.stage=2 precision=fp32 train.accumulate=3 block.activation_checkpoint=full",
    "mesh.pp=2 mesh.tp=2 zero.stage=1 precision=fp32 model.kv_heads=2 train.accumulate=2 model.tied=true",
    "mesh.pp=2 zero.stage=2 precision=fp16 train.accumulate=4 mesh.pp_schedule=interleaved model.layers=4",
    "mesh.pp=2 mesh.dp=2 zero.stage=2 precision=bf16 train.accumulate=2 offload=host offload.overlap=forward",
    "model=tiny_moe model.layers=4 model.balance=loss mesh.pp=2 mesh.dp=2 mesh.ep=2 mesh.pp_schedule=interleaved "
    "zero.stage=1 precision=fp32 train.accumulate=2",
    "model=tiny_moe model.kv_heads=2 model.balance=loss mesh.pp=2 mesh.tp=2 mesh.ep=2 zero.stage=2 precision=fp32 "
    "train.accumulate=2",
]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("line", LINES)
def test_a_run_has_the_losses_of_one_without_parts_and_the_traffic_of_theory(
    pool: Pool, tmp_path: Path, line: str
) -> None:
    text = write_text(tmp_path / "text.txt")
    settings = ["train.evaluate_every_steps=2", *line.split()]
    alone = [each for each in settings if not each.startswith("mesh.")]
    run = settled(text, *settings)
    told = pool.run(train, workers_of(run), run, tmp_path / "cut", timeout_s=300)
    want = pool.run(train, run.mesh.dp or 1, settled(text, *alone), tmp_path / "whole", timeout_s=300)[0]
    assert all(each.agrees for each in told)
    for each in told:
        assert each.losses == pytest.approx(want.losses, rel=FP32 if "fp32" in line else 2e-2)
        assert each.held_out == pytest.approx(want.held_out, rel=FP32 if "fp32" in line else 2e-2)


@pytest.mark.full
def test_a_run_goes_on_with_other_parts_and_without(pool: Pool, tmp_path: Path) -> None:
    """Steps of the same 4 sequences, over 1, 2 and 4 ranks; the shared rate of tied parameters goes with them."""
    text = write_text(tmp_path / "text.txt")
    saving = ["checkpoint.every=2", f"checkpoint.folder={tmp_path / 'saved'}"]
    settings = ["precision=fp32", "train.global_sequences=4", "train.accumulate=null", "train.evaluate_batches=0"]
    settings += ["schedule.kind=constant", "schedule.warmup_steps=0", "train.microbatch_sequences=1", "model.tied=true"]
    settings += ["model.layers=4", "model.kv_heads=2"]
    want = pool.run(train, 1, settled(text, *settings, "train.steps=8"), tmp_path)[0].losses
    losses = []
    for steps, mesh in ((2, "mesh.pp=1"), (4, "mesh.pp=2 mesh.tp=2"), (6, "mesh.pp=4 mesh.dp=1"), (8, "mesh.dp=2")):
        run = settled(text, *settings, *saving, f"train.steps={steps}", *mesh.split(), "resume=auto")
        losses += pool.run(train, workers_of(run), run, tmp_path, timeout_s=300)[0].losses
    assert losses == pytest.approx(want, rel=FP32)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_a_model_of_transformers_is_cut_too(pool: Pool, tmp_path: Path, kind: str) -> None:
    text = write_text(tmp_path / "text.txt")
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **sizes, **heads}))
    unset = [f"model.{key}=null" for key in ("hidden_size", "layers", "heads", "kv_heads", "ffn_size")]
    settings = ["model=hf", f"model.name_or_path={tmp_path}", "precision=fp32", "train.accumulate=2", *unset]
    (want,) = pool.run(train, 1, settled(text, *settings), tmp_path / "whole", timeout_s=300)
    told = pool.run(train, 2, settled(text, *settings, "mesh.pp=2", "zero.stage=2"), tmp_path / "cut", timeout_s=300)
    assert told[0].losses == pytest.approx(want.losses, rel=FP32)
    assert told[1].agrees
