"""What is noted of a run, from records with known figures: rates, lines, tables, boards, traces and names."""

from __future__ import annotations

import gzip
import json
import math
import re
import shlex
import time
from collections import Counter
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
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
from dzero.monitor.run_names import MOST_CHARACTERS, run_name, settings_name
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


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def run_steps(meter: Meter, clock: Clock, seconds: list[float], *, tokens: int = 100, pause_s: float = 0.0) -> None:
    """Steps of the given lengths, each followed by a pause that belongs to none."""
    for step_s in seconds:
        meter.begin()
        clock.now_s += step_s
        assert meter.end(tokens) == pytest.approx(step_s)
        clock.now_s += pause_s


def test_warm_up_steps_are_in_no_rate() -> None:
    clock = Clock()
    meter = Meter(total_steps=10, warmup_steps=2, clock=clock)
    run_steps(meter, clock, [50.0, 40.0])
    assert meter.now() == meter.overall() == Throughput()
    assert meter.eta_s() is None
    run_steps(meter, clock, [2.0, 2.0])
    assert meter.now().tokens_per_s == meter.overall().tokens_per_s == pytest.approx(100 / 2)
    assert (meter.steps, meter.counted_steps, meter.tokens) == (4, 2, 400)
    assert meter.seconds == pytest.approx(94)


def test_now_is_the_median_of_the_window_and_overall_the_mean() -> None:
    clock = Clock()
    meter = Meter(total_steps=10, warmup_steps=0, window_steps=3, clock=clock)
    run_steps(meter, clock, [10.0, 1.0, 2.0, 8.0])
    assert meter.now().tokens_per_s == pytest.approx(50)  # of 100, 50, 12.5
    assert meter.overall().tokens_per_s == pytest.approx(400 / 21)


def test_time_left_includes_what_lies_between_steps_but_rates_do_not() -> None:
    clock = Clock()
    meter = Meter(total_steps=7, warmup_steps=1, clock=clock)
    run_steps(meter, clock, [30.0, 1.0, 1.0, 1.0], pause_s=0.5)
    assert meter.overall().tokens_per_s == pytest.approx(100)
    assert meter.eta_s() == pytest.approx(3 * (3 * 1.0 + 2 * 0.5) / 3)  # 3 steps left; 4 s for the 3 counted


def test_mfu_is_model_flops_over_the_peak_of_all_devices_or_unknown() -> None:
    for peak_flops, mfu in ((1e12, pytest.approx(6e9 * 200 / 4e12)), (None, None)):  # 200 tokens/s: 0.3
        clock = Clock()
        meter = Meter(total_steps=1, flops_per_token=6e9, peak_flops=peak_flops, ranks=4, warmup_steps=0, clock=clock)
        run_steps(meter, clock, [0.5], tokens=100)
        assert meter.now() == Throughput(tokens_per_s=200.0, mfu=mfu)


# Lines of the log


def test_a_file_gets_plain_lines_of_keys_and_values() -> None:
    file = StringIO()
    Console(300, terminal=Terminal(file=file, width=40)).step(RECORD)
    assert file.getvalue() == (
        "step=1 loss=5.5000 lr=3.000e-04 grad_norm=1.25 loss_scale=65536 tokens_per_s=8192 mfu=0.4210 "
        "memory_mib=64 eta_s=83\n"
    )
    assert all(re.fullmatch(r"\w+=[^\s=]+", word) for word in file.getvalue().split())


def test_a_file_gets_the_first_the_last_and_every_nth_step() -> None:
    file = StringIO()
    console = Console(25, log_every_steps=10, terminal=Terminal(file=file))
    for step in range(1, 26):
        console.step(record_of(step))
    assert [line.split()[0] for line in file.getvalue().splitlines()] == ["step=1", "step=10", "step=20", "step=25"]


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
    assert "held-out loss" in shown
    assert "────" in shown


def test_a_live_line_leaves_out_what_is_not_known() -> None:
    bare = replace(RECORD, speed=Throughput(), eta_s=None, memory_bytes={}, skipped_steps=2)
    assert live_line(bare, None) == "loss 5.500 · 2 skipped"


def test_a_file_gets_held_out_losses_notes_and_the_summary_without_escapes_or_rules() -> None:
    file = StringIO()
    console = Console(25, log_every_steps=100, terminal=Terminal(file=file, width=30))
    console.held_out(20, 3.25, {})
    console.note(21, "skipped: gradient of [layers.0.w] is not finite")
    assert file.getvalue() == (
        "step=20 held_out_loss=3.2500 held_out_perplexity=25.790\n"
        "step=21 skipped: gradient of [layers.0.w] is not finite\n"
    )
    console.summary(SUMMARY)
    assert re.search(r"held-out loss +2\.5000", file.getvalue())
    assert re.search(r"reduce +reduce_scatter +shard .*≠", file.getvalue())
    assert "\x1b" not in file.getvalue()
    assert "──" not in file.getvalue()


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
def test_traffic_is_ok_only_when_calls_and_bytes_equal_the_theory_exactly(
    traffic: Any, expected: Any, marks: dict[str, int]
) -> None:
    rows = traffic_table(replace(SUMMARY, traffic=traffic, expected=expected)).rows
    assert Counter(row[-1] for row in rows) == marks


def test_memory_has_a_row_per_rank_and_its_kinds_add_up() -> None:
    table = memory_table(SUMMARY)
    assert table.header == ("rank", "param", "activations", "total")
    assert table.rows == (("0", "10.0 MiB", "54.0 MiB", "64.0 MiB"), ("1", "11.0 MiB", "53.0 MiB", "64.0 MiB"))


def test_memory_of_many_ranks_is_shown_by_its_extremes() -> None:
    many = replace(SUMMARY, peak_bytes=[{"param": (rank * 7 % 64 + 1) * MIB} for rank in range(64)])
    assert [row[0] for row in memory_table(many).rows] == ["0 (least)", "9 (most)"]  # 9 * 7 = 63


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.0, "1.000"), (2.5, "12.182"), (14.0, "1.2e+06"), (1e4, "inf"), (math.nan, "nan")]
)
def test_the_perplexity_is_the_exponential_of_the_held_out_loss_and_overflows_to_infinity(
    loss: float, shown: str
) -> None:
    assert dict(result_table(replace(SUMMARY, held_out_loss=loss)).rows)["held-out perplexity"] == shown
    assert held_out_scalars(loss, {"a": 0.0})["perplexity/held_out_a"] == 1.0


def test_what_is_not_known_is_said() -> None:
    values = dict(result_table(replace(SUMMARY, speed=Throughput(), peak_flops=None, held_out_loss=None)).rows)
    assert values["MFU"] == "unknown peak"
    assert values["held-out loss"] == "not evaluated"
    assert "held-out perplexity" not in values
    assert values["tokens/s"].startswith("unknown")
    known = dict(result_table(SUMMARY).rows)
    assert known["MFU"] == "42.1% of 989.4 TFLOP/s per device"
    assert known["tokens/s"].startswith("8,192 (297 steps")


def test_the_peak_stands_beside_what_was_planned_of_it() -> None:
    peaks = ({"param": 10 * 2**20, "activations": 54 * 2**20, "process": 2**30},)
    rows = dict(result_table(replace(SUMMARY, planned_bytes=63 * 2**20, peak_bytes=peaks)).rows)
    assert rows["device peak"] == "64.0 MiB, predicted 63.0 MiB"
    assert "device peak" not in dict(result_table(SUMMARY).rows)


# Boards


def make_monitor(folder: Path, *, rank: int = 0, config: MonitorConfig | None = None) -> Monitor:
    return Monitor(
        config or MonitorConfig(),
        folder,
        rank=rank,
        total_steps=300,
        resolved_config="zero:\n  stage: 3",
        terminal=Terminal(file=StringIO()),
    )


def read_back(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def test_tensorboard_reads_every_scalar_back(tmp_path: Path) -> None:
    with make_monitor(tmp_path) as monitor:
        for step in (1, 2, 3):
            monitor.step(record_of(step))
        monitor.held_out(3, 3.25)
    events = read_back(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        *("loss/train", "loss/held_out", "perplexity/held_out"),
        *("speed/tokens_per_s", "speed/mfu", "speed/step_s", "speed/tokens"),
        *("optim/lr", "optim/grad_norm", "optim/loss_scale", "optim/skipped_steps"),
        *("memory/param_gib", "memory/moments_gib", "traffic/all_gather_gib", "traffic/reduce_scatter_gib"),
    }
    losses = [(point.step, point.value) for point in events.Scalars("loss/train")]
    assert losses == [(step, pytest.approx(5.5 - 0.01 * step)) for step in (1, 2, 3)]
    assert events.Scalars("traffic/reduce_scatter_gib")[0].value == pytest.approx(2000 / 2**30)
    assert events.Scalars("memory/moments_gib")[0].value == pytest.approx(54 / 1024)
    assert events.Scalars("loss/held_out")[0].step == 3
    assert events.Scalars("perplexity/held_out")[0].value == pytest.approx(25.790340)


def test_scalars_can_be_thinned(tmp_path: Path) -> None:
    with make_monitor(tmp_path, config=MonitorConfig(scalars_every_steps=2)) as monitor:
        for step in range(1, 6):
            monitor.step(record_of(step))
    assert [point.step for point in read_back(tmp_path).Scalars("loss/train")] == [2, 4]


def test_a_run_has_ten_thousand_points_unless_it_is_told_otherwise() -> None:
    every = {steps: MonitorConfig().scalars_every(steps) for steps in (1, 9_999, 10_000, 10_001, 1_000_000)}
    assert every == {1: 1, 9_999: 1, 10_000: 1, 10_001: 2, 1_000_000: 100}
    assert MonitorConfig(scalars_every_steps=7).scalars_every(1_000_000) == 7


NO_BOARD = MonitorConfig(tensorboard=False, wandb="a project", scalars_every_steps=2)


class Sent:
    """What a run of the library was told."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.summary: dict[str, Any] = {}
        self.finished = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_every_second_step_the_held_out_loss_and_the_summary_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    sent, given = Sent(), {}

    def init(**settings: Any) -> Sent:
        given.update(settings)
        return sent

    monkeypatch.setattr(wandb, "init", init)
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=4, resolved_config="train:\n  steps: 4\n") as monitor:
        for step in range(1, 5):
            monitor.step(record_of(step))
        monitor.held_out(4, 2.5)
        monitor.summary(SUMMARY)
    assert (given["project"], given["config"]) == ("a project", {"train": {"steps": 4}})
    assert [step for step, _ in sent.logged] == [2, 4, 4]
    assert sent.logged[0][1]["loss/train"] == record_of(2).loss
    assert sent.logged[2][1] == {"loss/held_out": 2.5, "perplexity/held_out": math.exp(2.5)}
    assert sent.summary["loss"] == SUMMARY.loss
    assert sent.summary["held_out_perplexity"] == math.exp(2.5)
    assert sent.finished


@pytest.mark.full(
    "tests/monitor/inside/test_inside_monitor.py::test_every_second_step_the_held_out_loss_and_the_summary_are_sent"
)
def test_the_library_itself_writes_a_run_that_can_be_sent_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Monitor(NO_BOARD, tmp_path, rank=0, total_steps=2, resolved_config="{}") as monitor:
        monitor.step(record_of(2))
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # the library's own process writes the file, and may still do so
    while b"loss/train" not in written.read_bytes():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_service_that_cannot_be_reached_is_told_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb

    def init(**_: Any) -> None:
        raise wandb.errors.CommError("no network")

    monkeypatch.setattr(wandb, "init", init)
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


def run_traced(profiler: Profiler, steps: int) -> None:
    """Steps of one named span and one matmul each."""
    with profiler:
        for step in range(1, steps + 1):
            with record_function(f"step {step}"), record_function("all_gather unit layers.0"):
                torch.mm(torch.ones(8, 8), torch.ones(8, 8))
            profiler.step()


def spans_of(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def die_after_step_3(profiler: Profiler) -> None:
    with profiler:
        for step in (1, 2, 3):
            with record_function(f"step {step}"):
                torch.ones(8).sum()
            profiler.step()
        raise OSError("gone")


def test_a_run_that_dies_leaves_the_steps_that_were_traced(tmp_path: Path) -> None:
    profiler = Profiler(ProfileConfig(enabled=True, start_step=2, steps=5), tmp_path, rank=0, device=CPU, run_steps=9)
    with pytest.raises(OSError, match="gone"):
        die_after_step_3(profiler)
    assert {"step 2", "step 3"} <= {span["name"] for span in spans_of(profiler.trace_path)}


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
        ("--multirun zero.stage=2", "zero.stage=2", "zero.stage=2,1"),
        ("--multirun", "", "1"),
    ],
)
def test_a_run_is_named_by_what_sets_it_apart_and_by_its_number_where_that_is_not_enough(
    command_line: str, given: str, name: str
) -> None:
    assert run_name(1, given.split(), command_line.split()) == name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ([], ""),
        (["zero.stage=3", "optim.lr=1e-3"], "_zero.stage=3_optim.lr=1e-3"),
        (["data.path=/texts/of a man/good.txt"], "_data.path=good.txt"),
        (["offload.disk.paths=[/nvme0,/nvme1]", "+extra=x", "~profile"], "_offload.disk.paths=nvme1_extra=x_profile"),
        (["model.name_or_path='org/name'"], "_model.name_or_path=name"),
        (["data.sources={a:1,b:2}"], "_data.sources=-a-1-b-2"),
    ],
)
def test_a_run_has_its_settings_in_its_name(given: list[str], name: str) -> None:
    assert settings_name(given) == name


def test_a_long_name_is_cut_and_numbered() -> None:
    values = [letter * 300 for letter in "ab"]
    names = {run_name(at, [f"data.name={value}"], [f"data.name={','.join(values)}"]) for at, value in enumerate(values)}
    assert len(names) == 2
    assert all(len(name) < MOST_CHARACTERS + 5 for name in names)


def test_a_name_of_a_run_can_stand_in_a_setting_without_quotes() -> None:
    given = ["zero.stage=3", "data.path=/a/b c,d.txt", "note='(x) ${y} #:%'", "words=[a,b]", "far=" + "x" * 300]
    name = settings_name(given)
    assert name.endswith("_words=-a-b_and-1-more")
    folder = f"outputs/2026-11-30/15-04-05-678901{name}"
    assert shlex.split(folder) == [folder]
    (override,) = OverridesParser.create().parse_overrides(spelt_out([f"resume={folder}"]))
    assert (override.key_or_group, override.value(), override.is_sweep_override()) == ("resume.source", folder, False)
