"""train.py with matrices shared among ranks, going on where other ranks read the samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pool import Pool
from small_runs import settled, train, write_text


def test_a_model_with_dropout_goes_on_over_other_axes(pool: Pool, tmp_path: Path) -> None:
    """Two ranks read samples of their own and draw their own masks; then both see the same, and must draw the same."""
    text = write_text(tmp_path / "text.txt")
    sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, "resid_pdrop": 0.1}))
    unset = [f"model.{key}=null" for key in ("hidden_size", "layers", "heads", "kv_heads", "ffn_size")]
    settings = ["model=hf", f"model.name_or_path={tmp_path}", "precision=fp32", "train.evaluate_batches=0", *unset]
    settings += ["train.accumulate=null", "train.global_sequences=4", "train.microbatch_sequences=1"]
    settings += ["checkpoint.every=1", f"checkpoint.folder={tmp_path / 'saved'}", "resume=auto"]
    for steps, mesh in ((1, "mesh.dp=2"), (2, "mesh.tp=2"), (3, "mesh.pp=1")):
        told = pool.run(train, 2, settled(text, *settings, f"train.steps={steps}", mesh), tmp_path, timeout_s=300)
        assert len(told[0].losses) == 1


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    "line",
    [
        "zero.stage=3 block.activation_checkpoint=full",
        "zero.stage=1 train.accumulate=2",
        "zero.stage=1 precision.compute=fp8_rowwise model.hidden_size=64 model.ffn_size=64",
        "zero.stage=3 precision.compute=fp8_tensorwise block.activation_checkpoint=full model.hidden_size=64 "
        "model.ffn_size=64",
    ],
)
def test_a_run_moves_what_theory_says_also_between_ranks_that_share_matrices(
    pool: Pool, tmp_path: Path, line: str
) -> None:
    run = settled(write_text(tmp_path / "text.txt"), "mesh.dp=2", "mesh.tp=2", "model.kv_heads=2", *line.split())
    for rank in pool.run(train, 4, run, tmp_path, timeout_s=300):
        assert rank.agrees
        assert "tensor" in rank.phases


def test_a_first_step_that_is_not_the_run_s_counts_too(pool: Pool, tmp_path: Path) -> None:
    """Every run counts in its own first step, after a resume as well."""
    text = write_text(tmp_path / "text.txt")
    saving = ["checkpoint.every=1", f"checkpoint.folder={tmp_path / 'saved'}", "resume=auto", "model.kv_heads=2"]
    for steps in (1, 3):
        run = settled(text, "mesh.dp=1", "mesh.tp=2", f"train.steps={steps}", *saving)
        assert all(rank.agrees and "tensor" in rank.phases for rank in pool.run(train, 2, run, tmp_path, timeout_s=300))
