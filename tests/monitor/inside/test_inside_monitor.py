"""What is noted of a run, from records with known figures: rates, lines, tables, boards, traces and names."""

from __future__ import annotations

import gzip
import json
import math
import re
import shlex
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import wandb
from allocated_peak import allocated_peak_bytes
from hydra.core.override_parser.overrides_parser import OverridesParser
from rich.console import Console as Terminal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.profiler import record_function

from dzero.comm.ledger import Entry, Traffic
from dzero.monitor.config import MonitorConfig, ProfileConfig
from dzero.monitor.console import Console, live_line
from dzero.monitor.memory import MemoryMeter, storage_bytes
from dzero.monitor.meter import Meter, Throughput
from dzero.monitor.profile import Profiler
from dzero.monitor.records import RunSummary, StepRecord
from dzero.monitor.run_names import run_name, settings_name
from dzero.monitor.sinks import Monitor
from dzero.monitor.summary import memory_table, result_table, traffic_table
from dzero.monitor.tensorboard import held_out_scalars
from dzero.overrides import spelt_out

CPU = torch.device("cpu")
MIB = 2**20

RECORD = StepRecord(
    step=1,
    loss=5.5,
    lr=3e-4,
    grad_norm=1.25,
    tokens=4096,
    seconds=0.5,
    loss_scale=65536.0,
    speed=Throughput(8192.0, 0.421),
    eta_s=83.0,
    memory_bytes={"param": 10 * MIB, "moments": 54 * MIB},
    traffic_bytes={"all_gather": 1000, "reduce_scatter": 2000},
)

GATHER = Entry("unshard", "all_gather", "shard", "bfloat16")
REDUCE = Entry("reduce", "reduce_scatter", "shard", "bfloat16")
CONTROL = Entry("control", "all_gather", "shard", "float64")

SUMMARY = RunSummary(
    steps=300,
    tokens=1_228_800,
    seconds=150.0,
    counted_steps=297,
    first_loss=5.55,
    loss=2.25,
    held_out_loss=2.5,
    speed=Throughput(8192.0, 0.421),
    peak_flops=989.4e12,
    skipped_steps=1,
    peak_bytes=({"param": 10 * MIB, "activations": 54 * MIB}, {"param": 11 * MIB, "activations": 53 * MIB}),
    traffic={GATHER: Traffic(1500, 300_000), REDUCE: Traffic(1501, 600_000), CONTROL: Traffic(300, 2400)},
    traffic_steps=300,
    expected={GATHER: Traffic(5, 1000), REDUCE: Traffic(5, 2000), CONTROL: Traffic(1, 8)},
)


def record_of(step: int) -> StepRecord:
    """RECORD of another step; the loss falls by 0.01 a step."""
    return replace(RECORD, step=step, loss=5.5 - 0.01 * step)


# Rates, with a clock that is told the time


def metered(seconds: list[float], *, tokens: int = 100, pause_s: float = 0.0, **options: Any) -> Meter:
    """After steps of the given lengths, each followed by a pause that belongs to none."""
    now_s = 100.0
    meter = Meter(clock=lambda: now_s, **options)
    for step_s in seconds:
        meter.begin()
        now_s += step_s
        assert meter.end(tokens) == pytest.approx(step_s)
        now_s += pause_s
    return meter


def test_warm_up_steps_are_in_no_rate() -> None:
    meter = metered([50.0, 40.0], total_steps=10, warmup_steps=2)
    assert meter.now() == meter.overall() == Throughput()
    assert meter.eta_s() is None
    meter = metered([50.0, 40.0, 2.0, 2.0], total_steps=10, warmup_steps=2)
    assert meter.now().tokens_per_s == meter.overall().tokens_per_s == pytest.approx(100 / 2)
    assert (meter.steps, meter.counted_steps, meter.tokens) == (4, 2, 400)
    assert meter.seconds == pytest.approx(94)


def test_now_is_the_median_of_the_window_and_overall_the_mean() -> None:
    meter = metered([10.0, 1.0, 2.0, 8.0], total_steps=10, warmup_steps=0, window_steps=3)
    assert meter.now().tokens_per_s == pytest.approx(50)  # of 100, 50, 12.5
    assert meter.overall().tokens_per_s == pytest.approx(400 / 21)


def test_time_left_includes_what_lies_between_steps_but_rates_do_not() -> None:
    meter = metered([30.0, 1.0, 1.0, 1.0], pause_s=0.5, total_steps=7, warmup_steps=1)
    assert meter.overall().tokens_per_s == pytest.approx(100)
    assert meter.eta_s() == pytest.approx(3 * (3 * 1.0 + 2 * 0.5) / 3)  # 3 steps left; 4 s for the 3 counted


@pytest.mark.parametrize(("peak_flops", "mfu"), [(1e12, 6e9 * 200 / 4e12), (None, None)])
def test_mfu_is_model_flops_over_the_peak_of_all_devices_or_unknown(peak_flops: Any, mfu: Any) -> None:
    meter = metered([0.5], total_steps=1, flops_per_token=6e9, peak_flops=peak_flops, ranks=4, warmup_steps=0)
    assert meter.now() == Throughput(tokens_per_s=200.0, mfu=mfu and pytest.approx(mfu))


# Lines of the log


def test_a_file_gets_plain_lines_of_the_first_the_last_and_every_nth_step_without_escapes_or_rules() -> None:
    file = StringIO()
    console = Console(25, log_every_steps=10, terminal=Terminal(file=file, width=30))
    console.step(RECORD)
    line = "step=1 loss=5.5000 lr=3.000e-04 grad_norm=1.25 loss_scale=65536"
    line += " tokens_per_s=8192 mfu=0.4210 memory_mib=64 eta_s=83"
    for step in range(2, 21):
        console.step(record_of(step))
    console.held_out(20, 3.25, {})
    console.note(21, "skipped: gradient of [layers.0.w] is not finite")
    console.step(record_of(25))
    first, *lines = file.getvalue().splitlines()
    assert first == line
    assert [each.split()[0] for each in lines] == ["step=10", "step=20", "step=20", "step=21", "step=25"]
    assert lines[2] == "step=20 held_out_loss=3.2500 held_out_perplexity=25.790"
    assert lines[3] == "step=21 skipped: gradient of [layers.0.w] is not finite"
    console.summary(SUMMARY)
    assert re.search(r"held-out loss +2\.5000", file.getvalue())
    assert re.search(r"reduce +reduce_scatter +shard .*≠", file.getvalue())
    assert "\x1b" not in file.getvalue()
    assert "──" not in file.getvalue()


def test_a_terminal_gets_one_live_line_and_ruled_tables() -> None:
    file = StringIO()
    terminal = Terminal(file=file, force_terminal=True, width=140, _environ={"TERM": "xterm"})
    console = Console(300, terminal=terminal)
    console.held_out(5, 3.25, {})
    for step in range(1, 8):
        console.step(record_of(step))
    console.note(7, "skipped: gradient of [w] is not finite")
    console.summary(SUMMARY)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue())
    assert "step 7/300" in shown
    assert "loss 5.430 · held-out 3.250 · 8,192 tokens/s · MFU 42.1% · 64.0 MiB · ETA 1:23" in shown
    assert "step=7 skipped: gradient of [w] is not finite" in shown
    assert "\x1b[2K" in file.getvalue()  # the line was redrawn in place
    assert "────" in shown
    bare = replace(RECORD, speed=Throughput(), eta_s=None, memory_bytes={}, skipped_steps=2)
    assert live_line(bare, None) == "loss 5.500 · 2 skipped"


# Tables at the end


INSIDE = replace(REDUCE, phase="tensor", axis="tp")
STEP, RUN = Traffic(5, 1000), Traffic(1500, 300_000)
MARKS = [
    (SUMMARY.traffic, SUMMARY.expected, {"ok": 2, "≠": 1}),  # of sums, there was one call too many in 300 steps
    ({GATHER: RUN}, {GATHER: STEP}, {"ok": 1}),
    ({GATHER: replace(RUN, sent_bytes=300_001)}, {GATHER: STEP}, {"≠": 1}),
    ({}, {GATHER: STEP}, {"≠": 1}),
    ({REDUCE: STEP}, {}, {"≠": 1}),
    ({INSIDE: RUN}, {}, {"": 1}),  # what a model moves inside, for which there is no formula
    ({INSIDE: RUN}, {replace(INSIDE, kind="all_gather"): STEP}, {"≠": 2}),
]


@pytest.mark.parametrize(("traffic", "expected", "marks"), MARKS)
def test_traffic_is_ok_only_where_it_equals_the_theory(traffic: Any, expected: Any, marks: dict[str, int]) -> None:
    rows = traffic_table(replace(SUMMARY, traffic=traffic, expected=expected)).rows
    assert Counter(row[-1] for row in rows) == marks


def test_memory_has_a_row_per_rank_or_of_many_the_extremes_and_its_kinds_add_up() -> None:
    table = memory_table(SUMMARY)
    assert table.header == ("rank", "param", "activations", "total")
    assert table.rows == (("0", "10.0 MiB", "54.0 MiB", "64.0 MiB"), ("1", "11.0 MiB", "53.0 MiB", "64.0 MiB"))
    many = replace(SUMMARY, peak_bytes=[{"param": (rank * 7 % 64 + 1) * MIB} for rank in range(64)])
    assert [row[0] for row in memory_table(many).rows] == ["0 (least)", "9 (most)"]  # 9 * 7 = 63


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.0, "1.000"), (2.5, "12.182"), (14.0, "1.2e+06"), (1e4, "inf"), (math.nan, "nan")]
)
def test_the_perplexity_is_the_exponential_of_the_held_out_loss(loss: float, shown: str) -> None:
    assert dict(result_table(replace(SUMMARY, held_out_loss=loss)).rows)["held-out perplexity"] == shown
    assert held_out_scalars(loss, {"a": 0.0})["perplexity/held_out_a"] == 1.0


def test_what_is_not_known_is_said_and_a_peak_stands_beside_what_was_planned_of_it() -> None:
    values = dict(result_table(replace(SUMMARY, speed=Throughput(), peak_flops=None, held_out_loss=None)).rows)
    assert (values["MFU"], values["held-out loss"]) == ("unknown peak", "not evaluated")
    assert values["tokens/s"].startswith("unknown")
    assert values.keys().isdisjoint({"held-out perplexity", "device peak"})
    peaks = ({"param": 10 * MIB, "activations": 54 * MIB, "process": 1 << 30},)
    known = dict(result_table(replace(SUMMARY, planned_bytes=63 * MIB, peak_bytes=peaks)).rows)
    assert known["MFU"] == "42.1% of 989.4 TFLOP/s per device"
    assert known["tokens/s"].startswith("8,192 (297 steps")
    assert known["device peak"] == "64.0 MiB, predicted 63.0 MiB"


# Boards


def read_back(folder: Path, config: MonitorConfig) -> EventAccumulator:
    """The events of a run of five steps, the fourth of which is followed by an evaluation."""
    terminal = Terminal(file=StringIO())
    with Monitor(config, folder, rank=0, total_steps=300, resolved_config="zero:", terminal=terminal) as monitor:
        for step in range(1, 6):
            monitor.step(record_of(step))
            if step == 4:
                monitor.held_out(4, 3.25)
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_every_scalar_back(tmp_path: Path) -> None:
    events = read_back(tmp_path, MonitorConfig())
    assert set(events.Tags()["scalars"]) == {
        *("loss/train", "loss/held_out", "perplexity/held_out"),
        *("speed/tokens_per_s", "speed/mfu", "speed/step_s", "speed/tokens"),
        *("optim/lr", "optim/grad_norm", "optim/loss_scale", "optim/skipped_steps"),
        *("memory/param_gib", "memory/moments_gib", "traffic/all_gather_gib", "traffic/reduce_scatter_gib"),
    }
    losses = [(point.step, point.value) for point in events.Scalars("loss/train")]
    assert losses == [(step, pytest.approx(5.5 - 0.01 * step)) for step in range(1, 6)]
    assert events.Scalars("traffic/reduce_scatter_gib")[0].value == pytest.approx(2000 / 2**30)
    assert events.Scalars("memory/moments_gib")[0].value == pytest.approx(54 / 1024)
    assert events.Scalars("loss/held_out")[0].step == 4
    assert events.Scalars("perplexity/held_out")[0].value == pytest.approx(25.790340)


def test_scalars_can_be_thinned_and_are_of_ten_thousand_steps_unless_it_is_said(tmp_path: Path) -> None:
    thinned = read_back(tmp_path, MonitorConfig(scalars_every_steps=2))
    assert [point.step for point in thinned.Scalars("loss/train")] == [2, 4]
    every = {steps: MonitorConfig().scalars_every(steps) for steps in (1, 10_000, 10_001, 1_000_000)}
    assert every == {1: 1, 10_000: 1, 10_001: 2, 1_000_000: 100}


NO_BOARD = MonitorConfig(tensorboard=False, wandb="a project", scalars_every_steps=2)


def test_steps_the_held_out_loss_and_the_summary_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = MagicMock(summary={})
    monkeypatch.setattr("wandb.init", init := MagicMock(return_value=sent))
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=4, resolved_config="train:\n  steps: 4\n") as monitor:
        for step in range(1, 5):
            monitor.step(record_of(step))
        monitor.held_out(4, 2.5)
        monitor.summary(SUMMARY)
    given = init.call_args.kwargs
    assert (given["project"], given["config"]) == ("a project", {"train": {"steps": 4}})
    logged = [(call.kwargs["step"], call.args[0]) for call in sent.log.call_args_list]
    assert [step for step, _ in logged] == [2, 4, 4]
    assert logged[0][1]["loss/train"] == record_of(2).loss
    assert logged[2][1] == {"loss/held_out": 2.5, "perplexity/held_out": math.exp(2.5)}
    assert (sent.summary["loss"], sent.summary["held_out_perplexity"]) == (SUMMARY.loss, math.exp(2.5))
    sent.finish.assert_called_once_with()


@pytest.mark.full("tests/monitor/inside/test_inside_monitor.py::test_steps_the_held_out_loss_and_the_summary_are_sent")
def test_the_library_itself_writes_a_run_to_send_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=2, resolved_config="{}") as monitor:
        monitor.step(record_of(2))
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 120  # the library's own process writes the file, and may still do so
    while b"loss/train" not in written.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_service_that_cannot_be_reached_is_told_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wandb.init", MagicMock(side_effect=wandb.errors.CommError("no network")))
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=2) as monitor:
        monitor.step(record_of(2))
    assert "monitor.wandb=a project: nothing is sent: CommError: no network" in capsys.readouterr().out


# Memory and traces


def test_a_shared_storage_counts_once_and_whole_and_a_freed_one_not() -> None:
    base, freed = torch.zeros(1000, dtype=torch.bfloat16), torch.zeros(1000)
    freed.untyped_storage().resize_(0)
    assert storage_bytes([base, base[10:], base.view(10, 100), base.detach()]) == 2000
    assert storage_bytes([base[:10], torch.zeros(1000)]) == 2000 + 4000
    assert storage_bytes([freed, torch.zeros(1000, device="meta"), torch.zeros(0)]) == 0


@pytest.mark.gpu
def test_the_kinds_add_up_to_the_peak_on_cuda() -> None:
    device = torch.device("cuda", 0)
    meter = MemoryMeter(device)
    states = torch.ones(8 * MIB, device=device)
    assert meter.reset()
    temporary = torch.ones(16 * MIB, device=device)
    del temporary
    kinds = meter.split({"param": states.nbytes})
    assert kinds["activations"] == 64 * MIB
    assert sum(kinds.values()) == meter.peak_bytes()
    assert allocated_peak_bytes(lambda: torch.ones(MIB, device=device), device) == 4 * MIB


def test_a_run_that_dies_leaves_the_steps_that_were_traced(tmp_path: Path) -> None:
    profiler = Profiler(ProfileConfig(enabled=True, start_step=2, steps=5), tmp_path, rank=0, device=CPU, run_steps=9)
    with suppress(OSError), profiler:
        for step in (1, 2, 3):
            with record_function(f"step {step}"):
                torch.ones(8).sum()
            profiler.step()
        raise OSError("gone")
    with gzip.open(profiler.trace_path, "rt") as file:
        spans = {event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X"}
    assert {"step 2", "step 3"} <= spans


@pytest.mark.gpu
def test_on_cuda_the_allocations_are_kept_too(tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    profiler = Profiler(
        ProfileConfig(enabled=True, start_step=2, steps=1), tmp_path, rank=0, device=device, run_steps=3
    )
    with profiler:
        for _ in range(3):
            torch.ones(8, device=device).sum().item()
            profiler.step()
    assert profiler.snapshot_path is not None
    assert profiler.snapshot_path.stat().st_size > 0
    assert profiler.trace_path.exists()


# Names of folders


@pytest.mark.parametrize(
    ("command_line", "given", "name"),
    [
        ("--multirun zero.stage=0,3 train.steps=9", "zero.stage=3 train.steps=9", "zero.stage=3"),
        ("-m zero.stage=0,3 offload=none,host", "zero.stage=3 offload=host", "zero.stage=3,offload=host"),
        ("-m optim.lr=range(1,3)", "optim.lr=2", "optim.lr=2"),
        ("-m data.path=/a/b,/a_b", "data.path=/a/b", "data.path=_a_b,1"),  # the other run's name is data.path=_a_b
        ("-m train.seed=7,7", "train.seed=7", "train.seed=7,1"),
        ("-m model=glob(b*)", "model=bench_21m", "model=bench_21m,1"),
        ("--multirun", "", "1"),
        (f"-m train.seed={'7' * 300},8", f"train.seed={'7' * 300}", f"train.seed={'7' * 109},1"),
    ],
)
def test_a_run_is_named_by_what_sets_it_apart_and_by_its_number(command_line: str, given: str, name: str) -> None:
    assert run_name(1, given.split(), command_line.split()) == name


SETTINGS = {
    "": "",
    "data.path=/texts/of_a_man/good.txt": "_data.path=good.txt",
    "offload.disk.paths=[/nvme0,/nvme1] +extra=x ~profile": "_offload.disk.paths=nvme1_extra=x_profile",
    "model.name_or_path='org/name'": "_model.name_or_path=name",
    "data.sources={a:1,b:2}": "_data.sources=-a-1-b-2",
}


def test_a_run_has_its_settings_in_its_name() -> None:
    assert {given: settings_name(given.split()) for given in SETTINGS} == SETTINGS


def test_a_name_of_a_run_can_stand_in_a_setting_without_quotes() -> None:
    given = ["zero.stage=3", "data.path=/a/b c,d.txt", "note='(x) ${y} #:%'", "words=[a,b]", "far=" + "x" * 300]
    name = settings_name(given)  # a long one is cut
    assert len(name) < 200
    assert name.endswith("_words=-a-b_and-1-more")
    folder = f"outputs/2026-11-30/15-04-05-678901{name}"
    assert shlex.split(folder) == [folder]
    (override,) = OverridesParser.create().parse_overrides(spelt_out([f"resume={folder}"]))
    assert (override.key_or_group, override.value(), override.is_sweep_override()) == ("resume.source", folder, False)
