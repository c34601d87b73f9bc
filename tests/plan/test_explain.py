"""`python -m dzero explain`: what is told of a step is what the table costs, and every setting has its source."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import cast

import pytest
from in_process import dzero

from dzero.estimate.explain import collectives, folded
from dzero.hardware import format_bytes
from dzero.monitor.tensorboard import TensorBoardSink
from dzero.overrides import composed
from dzero.plan.meta_model import as_on_a_rank, model_of, units_of
from dzero.plan.plan_run import explain_run, log_plan
from dzero.plan.provenance import auto_values, settings_table
from dzero.plan.run_layout import layout_of
from dzero.zero.cost_model import expected_traffic
from dzero.zero.layout import Layout
from dzero.zero.unit_shapes import UnitShape

CONF = Path(__file__).parent.parent.parent / "conf"
SMALL = ["model.hidden_size=64", "model.layers=5", "model.heads=2", "model.ffn_size=128", "model.vocab_size=256"]
LAYOUTS = [
    "zero.stage=0",
    "zero.stage=1 train.accumulate=3",
    "zero.stage=2 train.accumulate=3",
    "zero.stage=3",
    "zero.stage=3 train.accumulate=2",
    "zero.stage=3 zero.reshard_after_forward=false",
    "zero.stage=3 zero.reshard_after_forward=4",
    "zero.stage=3 mesh.replicate=4 train.accumulate=2",
    "zero.stage=1 mesh.replicate=2 precision=fp32",
    "zero.stage=3 zero.reduction=native mesh.replicate=2",
]


SEQUENCE = ["train.microbatch_sequences=2", "train.sequence_tokens=64", "model.vocab_size=256"]
SHARED = [
    "mesh.ep=4 zero.stage=3",
    "mesh.ep=8 zero.stage=2 train.accumulate=2",
    "mesh.ep=4 zero.stage=0",
    "mesh.ep=4 mesh.tp=2 zero.stage=1 model.kv_heads=2 train.accumulate=2",
    "mesh.ep=2 mesh.replicate=2 mesh.pp=2 zero.stage=3 train.accumulate=2",
]


@pytest.mark.parametrize("settings", LAYOUTS)
def test_the_collectives_told_one_by_one_add_up_to_the_table(settings: str) -> None:
    config = composed([*SMALL, "mesh.dp=16", *settings.split()], CONF)
    check(layout_of(config, "cpu"), units_of(config, model_of(config)))


@pytest.mark.parametrize("settings", SHARED)
def test_those_of_experts_that_ranks_share_do_so_too(settings: str) -> None:
    config = composed(["model=tiny_moe", "mesh.dp=8", *settings.split()], CONF)
    model = model_of(config)
    with as_on_a_rank(config, model) as rank:
        units = units_of(config, model, rank)
    experts = [unit for unit in units if unit.shared_by > 1]
    assert len(experts) == 4 // config.mesh.pp
    assert experts[0].params[0].shape == (8 // config.mesh.ep * 160, 192)
    check(layout_of(config, "cpu"), units)


def test_what_tokens_move_to_experts_is_told_for_choices_that_are_alike() -> None:
    settings = ["model=tiny_moe", "mesh.dp=2", "mesh.ep=2", "train.microbatch_sequences=1", "train.sequence_tokens=64"]
    tables, _ = explain_run(composed(settings, CONF), settings, CONF)
    told = {row[2]: row[3:] for row in tables[-1].rows}
    assert tables[-1].title.startswith("what tokens move to experts, all chosen alike,")
    assert told["int64"] == ("4", format_bytes(4 * 4 * 8)), "counts of 4 experts for the other rank, in 4 layers"
    rows = 64 * 2 // 2  # half of two choices each; as many come, and both go back, forward and in backward
    assert told["bfloat16"] == ("16", format_bytes(4 * 4 * rows * 192 * 2))


@pytest.mark.parametrize(
    ("schedule", "sends", "blocks"), [("1f1b", 2, "layers.0 … layers.1"), ("interleaved", 6, "layers.0 … layers.2")]
)
def test_what_a_pipeline_passes_on_is_told_of_its_first_rank(schedule: str, sends: int, blocks: str) -> None:
    """Of 4 blocks in 2 parts, or in 4 of which it has the first and the third: each sends on, and back what it got."""
    settings = ["mesh.dp=2", "mesh.pp=2", f"mesh.pp_schedule={schedule}", "train.accumulate=2", "zero.stage=2"]
    told, _ = explain_run(composed([*SEQUENCE, *settings], CONF), settings, CONF)
    assert "the first rank of the pipeline" in told[-1].title
    rows = {row[0]: row[1:] for row in told[-1].rows}
    hidden, tied = 2 * 64 * 192 * 2, 256 * 192 // 2 * 4
    assert rows["send"] == ("pp", "bfloat16", str(sends), format_bytes(sends * hidden))
    assert rows["exchange"] == ("pp", "float32", "1", format_bytes(tied))
    units = next(each for each in told if each.title.startswith("units"))
    assert [row[0] for row in units.rows] == [blocks, "root"]


@pytest.mark.parametrize("mesh", ["mesh.cp=2", "mesh.tp=2"])
def test_a_run_whose_ranks_share_is_told_how_to_get_its_plan(mesh: str) -> None:
    config = composed([*SEQUENCE, mesh, "mesh.dp=1"], CONF)
    peak, lacks = log_plan(cast(TensorBoardSink, None), 1, config, 2, "cpu", 256)
    assert peak is None
    assert lacks is not None
    assert "python -m dzero plan, with the same settings" in lacks


def check(layout: Layout, units: list[UnitShape]) -> None:
    calls, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in folded(collectives(layout, units)):
        calls[each.kind, each.axis] += each.count
        sent[each.kind, each.axis] += each.count * each.sent_bytes
    wanted = expected_traffic(layout, units)
    assert calls == Counter({(entry.kind, entry.axis): traffic.calls for entry, traffic in wanted.items()})
    assert sent == Counter({(entry.kind, entry.axis): traffic.sent_bytes for entry, traffic in wanted.items()})


def test_blocks_of_one_size_are_told_in_one_line() -> None:
    config = composed([*SMALL, "mesh.dp=16", "zero.stage=3", "mesh.replicate=2"], CONF)
    rows = folded(collectives(layout_of(config, "cpu"), units_of(config, model_of(config))))
    told = [(row.phase, row.kind, row.unit, row.last_unit) for row in rows]
    assert told[:2] == [
        ("forward", "all_gather", "root", "root"),
        ("forward", "all_gather", "layers.0", "layers.4"),
    ]
    assert set(told[2:5]) == {
        ("backward", kind, "layers.4", "layers.0") for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }


def test_a_large_embedding_and_a_large_head_are_told_as_units() -> None:
    settings = ["model=llama_8b", "mesh.dp=8", "zero.stage=3"]
    told, _ = explain_run(composed(settings, CONF), settings, CONF)
    units = next(each for each in told if each.title.startswith("units"))
    assert [row[0] for row in units.rows] == ["embedding", "layers.0 … layers.31", "head", "root"]
    step = next(each for each in told if each.title.startswith("collectives"))
    layers, behind = "layers.0 … layers.31", "layers.31 … layers.0"
    assert [(row[0], row[1], row[3], row[4]) for row in step.rows] == [
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


def test_every_setting_says_where_it_was_made() -> None:
    settings = ["model=llama_8b", "offload=host", "precision=bf16_remainder", "train.accumulate=2", "zero.stage=2"]
    config = composed(settings, CONF)
    found = {row[0]: row[1:] for row in settings_table(config, settings, CONF).rows}
    assert found["model.layers"] == ("32", "conf/model/llama_8b.yaml")
    assert found["offload.master"] == ("host", "conf/offload/host.yaml")
    assert found["precision.master"] == ("remainder", "conf/precision/bf16_remainder.yaml")
    assert found["train.accumulate"] == ("2", "the command line")
    assert found["zero.stage"] == ("2", "the command line"), "given, though it is the default"
    assert "optim.lr" not in found
    auto = {row[0]: row[2] for row in auto_values(config, layout_of(config, "cpu"), "cpu", "here").rows}
    assert auto["precision.grad"] == "fp32 where gradients are kept"
    assert auto["offload.overlap"] == "forward"


def test_settings_of_adapters_say_which_file_made_them() -> None:
    settings = ["--config-name=finetune", "adapter=qlora", "model.name_or_path=gpt2", "train.epochs=1"]
    found = {row[0]: row[1:] for row in settings_table(composed(settings, CONF), settings, CONF).rows}
    assert found["precision.frozen"] == ("nf4", "conf/adapter/qlora.yaml")
    assert found["optim.lr"] == ("0.0002", "conf/adapter/qlora.yaml")
    assert found["model.kind"] == ("hf", "conf/model/hf.yaml")
    assert found["data.kind"] == ("chat", "conf/finetune.yaml")
    assert found["train.epochs"] == ("1.0", "the command line")


@pytest.mark.parametrize(
    ("settings", "told"),
    {
        "mesh.dp=64": ("on 64 GPUs", "native: nccl's own sums"),
        "mesh.dp=2 hardware=h100_80g": ("on DGX H100", "native: nccl's own sums"),
        "mesh.dp=64 hardware=laptop": ("on laptop (4 cores, 16 GiB)", "exact, over gloo"),
        "mesh.dp=64 launch.device=cpu": ("on this machine's processor", "exact, over gloo"),
    }.items(),
)
def test_explain_names_the_reductions_of_the_machine_that_a_run_is_meant_for(
    settings: str, told: tuple[str, str]
) -> None:
    run = dzero("explain", *SMALL, *settings.split())
    assert run.returncode == 0, run.stderr
    where, reduction = told
    chosen = run.stdout.partition("settings that choose by themselves, ")[2]
    assert chosen.startswith(where)
    assert f"zero.reduction    auto   {reduction}" in chosen


def test_the_command_tells_of_a_run_that_fits_no_machine(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dzero", "explain", "model=llama_70b", "mesh.dp=512", "zero.stage=3", "offload=host"]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "stage 3 on 1 (replicate) x 512 (shard) ranks" in run.stdout
    assert "UPDATE" not in run.stdout
    assert "COMPUTE  update     layers.79" in run.stdout
