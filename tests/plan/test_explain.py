"""`python -m dzero explain`: what is told of a step is what a plan counts, and every setting has its source."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import from_words
import pytest
from in_process import dzero
from typed_commands import typed

SMALL = ["model.hidden_size=64", "model.layers=5", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]
SHAPE = "train.microbatch_sequences=2 train.sequence_tokens=64 model.vocab_size=256"
WIDE = f"{SHAPE} model.hidden_size=128 model.layers=3 model.heads=4 model.kv_heads=2 model.ffn_size=256"
TIED = 256 * 192 // 2 * 4
HIDDEN = 2 * 64 * 192 * 2
BYTES = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "B": 1}


def in_bytes(text: str) -> float:
    """The number of a cell such as `1.50 MiB`, which has three digits."""
    number, unit = text.split()
    return float(number) * BYTES[unit]


def rows_of(*words: str) -> dict[str, Any]:
    tables, _ = from_words.explained(*words)
    return {first: table.rows for first, table in tables.items()}


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    "line",
    [
        "zero.stage=0",
        "zero.stage=3 train.accumulate=2 mesh.replicate=4",
        "zero.stage=1 train.accumulate=3",
        "zero.stage=2 train.accumulate=3",
        "zero.stage=3 zero.reshard_after_forward=false",
        "zero.stage=3 zero.reshard_after_forward=4",
        "zero.stage=1 mesh.replicate=2 precision=fp32",
        "zero.stage=3 zero.reduction=native mesh.replicate=2",
        "model=tiny_moe mesh.dp=8 mesh.ep=8 zero.stage=2 train.accumulate=2",
        "model=tiny_moe mesh.dp=8 mesh.ep=4 zero.stage=0",
        "model=tiny_moe mesh.dp=8 mesh.ep=4 mesh.tp=2 zero.stage=1 model.kv_heads=2 train.accumulate=2",
    ],
)
def test_the_collectives_told_one_by_one_add_up_to_those_of_the_plan(line: str) -> None:
    words = [*line.split()] if "tiny_moe" in line else [*SMALL, "mesh.dp=16", *line.split()]
    words.append("launch.device=cpu")
    moved = from_words.forecast(*words).moved
    calls, sent = Counter[str](), Counter[str]()
    for _, _, axis, _, count, together in rows_of(*words)["collectives"]:
        calls[axis] += int(count)
        sent[axis] += in_bytes(together)
    for axis, count in calls.items():
        planned = [key for key in moved.calls if key.partition(",")[0] == axis]  # of experts too
        assert count == sum(moved.calls[key] for key in planned)
        assert sent[axis] == pytest.approx(sum(moved.axes[key] for key in planned), rel=0.005)  # of three digits


@pytest.mark.parametrize(
    ("line", "title", "told"),
    [
        # 3 blocks, 2 microbatches; keys and values of 2 x 64 tokens, 2 heads of 32 dims, in bf16, to the other rank
        (
            f"{WIDE} mesh.dp=1 mesh.cp=2 train.accumulate=2 zero.stage=2 train.sequence_tokens=128",
            "what attention passes on",
            dict.fromkeys(("all_gather", "reduce_scatter"), ("cp", "bfloat16", "6", 3 * 2 * 2 * (2 * 64 * 2 * 32) * 2)),
        ),
        # counts of 4 experts in 4 layers; half of two choices of 64 tokens, as many come, and both go back, twice
        (
            "model=tiny_moe mesh.dp=2 mesh.ep=2 train.microbatch_sequences=1 train.sequence_tokens=64",
            "what tokens move to experts, all chosen alike,",
            {"int64": ("4", 4 * 4 * 8), "bfloat16": ("16", 4 * 4 * 64 * 192 * 2)},
        ),
        # of 4 blocks in 2 parts, or in 4 of which the first rank has two: each sends on, and back what it got
        (
            f"{SHAPE} mesh.dp=2 mesh.pp=2 train.accumulate=2 zero.stage=2",
            "what the first rank of the pipeline",
            {"send": ("pp", "bfloat16", "2", 2 * HIDDEN), "exchange": ("pp", "float32", "1", TIED)},
        ),
        (
            f"{SHAPE} mesh.dp=2 mesh.pp=2 train.accumulate=2 zero.stage=2 mesh.pp_schedule=interleaved",
            "what the first rank of the pipeline",
            {"send": ("pp", "bfloat16", "6", 6 * HIDDEN), "exchange": ("pp", "float32", "1", TIED)},
        ),
    ],
)
def test_what_ranks_that_share_something_pass_on_is_told(line: str, title: str, told: dict[str, Any]) -> None:
    table = from_words.last_explained(*line.split())
    assert table.title.startswith(title)
    rows = {cell: row[row.index(cell) + 1 :] for row in table.rows for cell in row[:3] if cell in told}
    for name, (*cells, sent) in told.items():
        assert [*rows[name][:-1]] == cells
        assert in_bytes(rows[name][-1]) == pytest.approx(sent, rel=0.005)


def test_a_large_embedding_and_a_large_head_are_told_as_units() -> None:
    rows = rows_of("model=llama_8b", "mesh.dp=8", "zero.stage=3")
    assert [row[0] for row in rows["units"]] == ["embedding", "layers.0 … layers.31", "head", "root"]
    layers, behind = "layers.0 … layers.31", "layers.31 … layers.0"
    assert [(row[0], row[1], row[3], row[4]) for row in rows["collectives"]] == [
        ("forward", "all_gather", "root", "1"),
        ("forward", "all_gather", "embedding", "1"),
        ("forward", "all_gather", layers, "32"),
        ("forward", "all_gather", "head", "1"),
        ("backward", "reduce_scatter", "head", "1"),
        ("backward", "all_gather", behind, "32"),
        ("backward", "reduce_scatter", behind, "32"),
        ("backward", "all_gather", "embedding", "1"),
        ("backward", "reduce_scatter", "embedding", "1"),
        ("backward", "reduce_scatter", "root", "1"),
    ], "head and root stay gathered from forward to backward"


SOURCES = {
    "model=llama_8b offload=host precision=bf16_remainder train.accumulate=2 zero.stage=2": {
        "model.layers": ("32", "conf/model/llama_8b.yaml"),
        "offload.master": ("host", "conf/offload/host.yaml"),
        "precision.master": ("remainder", "conf/precision/bf16_remainder.yaml"),
        "train.accumulate": ("2", "the command line"),
        "zero.stage": ("2", "the command line"),  # given, though it is the default
    },
    "experiment=gpus_512 train.accumulate=2": {
        "mesh.tp": ("8", "conf/experiment/gpus_512.yaml"),
        "train.accumulate": ("2", "the command line"),
        "model.layers": ("80", "conf/model/llama_70b.yaml"),
    },
    "--config-name=finetune adapter=qlora model.name_or_path=gpt2 train.epochs=1": {
        "precision.frozen": ("nf4", "conf/adapter/qlora.yaml"),
        "optim.lr": ("0.0002", "conf/adapter/qlora.yaml"),
        "model.kind": ("hf", "conf/model/hf.yaml"),
        "data.kind": ("chat", "conf/finetune.yaml"),
        "train.epochs": ("1.0", "the command line"),
    },
}


@pytest.mark.parametrize("line", SOURCES)
def test_every_setting_says_where_it_was_made(line: str) -> None:
    found = {key: (value, source) for key, value, source in from_words.sources(*line.split()).rows}
    assert {key: found[key] for key in SOURCES[line]} == SOURCES[line]
    assert ("optim.lr" in found) is ("optim.lr" in SOURCES[line])


@pytest.mark.parametrize(
    ("line", "where", "reduction"),
    [
        ("mesh.dp=64 offload=host zero.stage=2", "on 64 GPUs", "native: nccl's own sums"),
        ("mesh.dp=2 hardware=h100_80g", "on DGX H100", "native: nccl's own sums"),
        ("mesh.dp=64 launch.device=cpu", "on this machine's processor", "exact, over gloo"),
    ],
)
def test_what_settings_choose_by_themselves_is_told_for_the_machine(line: str, where: str, reduction: str) -> None:
    run = dzero("explain", *SMALL, *line.split())
    assert run.returncode == 0, run.stderr
    chosen = run.stdout.partition("settings that choose by themselves, ")[2]
    assert chosen.startswith(where)
    assert f"zero.reduction    auto   {reduction}" in chosen
    if "offload=host" in line:
        assert re.search(r"offload\.overlap +auto +forward", chosen)
        assert re.search(r"precision\.grad +auto +fp32 where gradients are kept", chosen)


def test_the_command_tells_of_a_run_that_fits_no_machine(tmp_path: Path) -> None:
    words = ["model=llama_70b", "model.layers=10", "mesh.dp=512", "zero.stage=3", "offload=host"]
    run = typed("-m", "dzero", "explain", *words, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert "stage 3 on 1 (replicate) x 512 (shard) ranks" in run.stdout
    assert "UPDATE" not in run.stdout
    assert "COMPUTE  update     layers.9" in run.stdout
