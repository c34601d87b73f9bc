"""`python -m dzero explain`: what is told of a step is what the table costs, and every setting has its source."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from dzero.command_line import composed
from dzero.on_a_rank import model_of, units_of
from dzero.plan.explain import collectives, folded
from dzero.planning import layout_of
from dzero.sources import sources, stands_for
from dzero.zero.account import expected_traffic

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


@pytest.mark.parametrize("settings", LAYOUTS)
def test_the_collectives_told_one_by_one_add_up_to_the_table(settings: str) -> None:
    config = composed([*SMALL, "mesh.dp=16", *settings.split()], CONF, here=False)
    layout = layout_of(config, "cpu")
    units = units_of(config, model_of(config))
    calls, sent = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in folded(collectives(layout, units)):
        calls[each.kind, each.axis] += each.count
        sent[each.kind, each.axis] += each.count * each.sent_bytes
    wanted = expected_traffic(layout, units)
    assert calls == Counter({(entry.kind, entry.axis): traffic.calls for entry, traffic in wanted.items()})
    assert sent == Counter({(entry.kind, entry.axis): traffic.sent_bytes for entry, traffic in wanted.items()})


def test_blocks_of_one_size_are_told_in_one_line() -> None:
    config = composed([*SMALL, "mesh.dp=16", "zero.stage=3", "mesh.replicate=2"], CONF, here=False)
    rows = folded(collectives(layout_of(config, "cpu"), units_of(config, model_of(config))))
    told = [(row.phase, row.kind, row.unit, row.last_unit) for row in rows]
    assert told[:3] == [
        ("forward", "all_gather", "root", "root"),
        ("forward", "all_gather", "layers.0", "layers.4"),
        ("backward", "all_gather", "root", "root"),
    ]
    assert set(told[3:6]) == {
        ("backward", kind, "layers.4", "layers.0") for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }


def test_every_setting_says_where_it_was_made() -> None:
    settings = ["model=llama_8b", "offload=host", "precision=bf16_remainder", "train.accumulate=2", "zero.stage=2"]
    config = composed(settings, CONF, here=False)
    found = {row[0]: row[1:] for row in sources(config, settings, CONF).rows}
    assert found["model.layers"] == ("32", "conf/model/llama_8b.yaml")
    assert found["offload.master"] == ("host", "conf/offload/host.yaml")
    assert found["precision.master"] == ("remainder", "conf/precision/bf16_remainder.yaml")
    assert found["train.accumulate"] == ("2", "the command line")
    assert found["zero.stage"] == ("2", "the command line"), "given, though it is the default"
    assert "optim.lr" not in found
    auto = {row[0]: row[2] for row in stands_for(config, layout_of(config, "cpu")).rows}
    assert auto["precision.grad"] == "fp32 where gradients are kept"
    assert auto["offload.overlap"] == "forward"


def test_the_command_tells_of_a_run_that_fits_no_machine(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "dzero", "explain", "model=llama_70b", "mesh.dp=512", "zero.stage=3", "offload=host"]
    run = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "stage 3 on 1 (replicate) x 512 (shard) ranks" in run.stdout
    assert "UPDATE" not in run.stdout
    assert "COMPUTE  update     layers.79" in run.stdout
