"""`python -m dzero verify` finds nothing in what is right, and every planted fault where it was planted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults import verified
from pool import Pool
from small_runs import CONF, ROOT, SMALL, write_text

from dzero.overrides import composed
from dzero.verify.config import VerifyRun
from dzero.verify.ladder import CONFIGURATION
from dzero.verify.report import VerifyReport, table, verdict
from dzero.verify.trace import GRAD, LOSS, MASTER, READ, Mark
from dzero.verify.verify import AGREES, NOT_COMPARED, verify

STEPS = 4
SECONDS = 400.0  # of a crowded machine; an idle one takes a 20th


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


def small(data: Path, *settings: str) -> list[str]:
    own = [f"train.steps={STEPS}", f"verify.steps={STEPS}", "launch.workers=2", f"data.path={data}"]
    return [*SMALL.split(), *own, *settings]


def report_of(pool: Pool, data: Path, folder: Path, line: str, *fault: Any, ranks: int = 2) -> VerifyReport:
    """What all ranks found."""
    run = composed(small(data, *line.split(), f"launch.workers={ranks}"), CONF, VerifyRun)
    reports = pool.run(verified, ranks, run, folder, *fault, timeout_s=SECONDS)
    assert all(report == reports[0] for report in reports)
    assert list(folder.iterdir()) == []
    assert len(table(reports[0]).rows) == len(reports[0].findings)
    return reports[0]  # type: ignore[no-any-return]


# What is right


@pytest.mark.product(keep=2)
@pytest.mark.parametrize(
    "line",
    [
        "zero.stage=3 offload=host_all precision=bf16_remainder train.accumulate=2",
        "zero.stage=2 block.tiles=3 block.activation_checkpoint=full",
        "zero.stage=3 offload=infinity offload.overlap=backward precision.moments=bf16",
        "zero.stage=3 offload=host offload.overlap=delayed offload.delay_warmup_steps=1",
        "zero.stage=1 train.accumulate=2 precision=fp16 scaler.init=1e9",
        "zero.stage=3 zero.unit_bytes=4000 offload=host_all block.activation_checkpoint=full",
    ],
)
def test_what_is_right_agrees_to_the_bit_wherever_bits_are_promised(
    pool: Pool, text: Path, tmp_path: Path, line: str
) -> None:
    scratch = [f"offload.disk.paths=[{text.parent}]"] if "infinity" in line else []
    report = report_of(pool, text, tmp_path, " ".join([line, *scratch]))
    assert report.agrees, verdict(report)
    assert "\nAGREES" in "\n" + verdict(report)
    last = report.findings[-1]
    assert (last.rung.name, last.allowed, last.apart) == (CONFIGURATION, None, None)


def test_two_hops_are_another_order_and_above_them_placement_changes_nothing(
    pool: Pool, text: Path, tmp_path: Path
) -> None:
    line = "zero.stage=3 mesh.replicate=2 zero.optimizer_shard_axes=[replicate,shard] offload=host"
    report = report_of(pool, text, tmp_path, line, ranks=4)
    assert report.agrees, verdict(report)
    _, hops, last = report.findings
    assert hops.allowed is not None
    assert hops.gap.within(hops.allowed)
    assert last.allowed is None
    assert "gradients take two hops" in verdict(report)


CUT = "mesh.cp=2 zero.stage=3 precision=fp32"


@pytest.mark.parametrize("line", [CUT, "mesh.cp=2 mesh.cp_attention=ulysses model.kv_heads=2 offload=host"])
def test_cut_sequences_agree_with_whole_ones_and_placement_changes_nothing(
    pool: Pool, text: Path, tmp_path: Path, line: str
) -> None:
    report = report_of(pool, text, tmp_path, line)
    assert report.agrees, verdict(report)
    _, cut, last = report.findings
    print(cut.gap)
    assert cut.allowed is not None
    if line == CUT:
        assert cut.gap.loss < 1e-5
        assert cut.gap.unit_norm < 1e-5
    assert last.allowed is None


TENSOR = "mesh.tp=2 model.kv_heads=2 zero.stage=3 precision=fp32"
PIPELINE = "mesh.pp=2 zero.stage=3 precision=fp32 train.accumulate=2"
EXPERTS = "model=tiny_moe mesh.ep=2 zero.stage=3 precision=fp32"
OVER = {TENSOR: "cut matrices", PIPELINE: "a pipeline", EXPERTS: "cut matrices"}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("line", "over", "ranks"),
    [
        *((line, over, 2) for line, over in OVER.items()),
        (f"{PIPELINE} mesh.pp_schedule=interleaved model.layers=4", "a pipeline", 2),
        pytest.param(f"{TENSOR} mesh.dp=2 mesh.replicate=2 offload=host", "cut matrices", 4, marks=pytest.mark.slow),
        pytest.param(f"{PIPELINE} mesh.tp=2 model.kv_heads=2", "a pipeline", 4, marks=pytest.mark.slow),
        pytest.param(f"{EXPERTS} mesh.tp=2 model.kv_heads=2 mesh.cp=2", "cut matrices", 4, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_is_cut_agrees_with_whole_ones_and_placement_changes_nothing(
    pool: Pool, text: Path, tmp_path: Path, line: str, over: str, ranks: int
) -> None:
    report = report_of(pool, text, tmp_path, line, ranks=ranks)
    assert report.agrees, verdict(report)
    itself, *rungs, last = report.findings
    assert itself.gap.sizes == (0, 0, 0, 0)
    assert last.allowed is None
    cut = next(finding for finding in rungs if finding.rung.name.endswith(f"over {over}"))
    print(cut.gap)
    assert 0 < cut.gap.unit_norm < 1e-6
    assert 0 < cut.gap.masters < 1e-3


# What is wrong


@pytest.mark.parametrize(
    ("line", "fault", "unit"),
    [(TENSOR, ("loud rank", "layers.1.ffn.down"), "layers.1"), (PIPELINE, ("lonely ends",), "root")],
)
def test_what_is_wrong_along_one_axis_is_found_where_it_begins(
    pool: Pool, text: Path, tmp_path: Path, line: str, fault: tuple[str, ...], unit: str
) -> None:
    report = report_of(pool, text, tmp_path, line, *fault)
    itself, cut, *others = report.findings
    assert itself.agrees
    assert not cut.agrees
    assert all(finding.agrees for finding in others)
    assert (cut.gap.unit, cut.gap.step) == (unit, 1)
    assert f"over {OVER[line]} from stage 0 on the device: " in verdict(report)


def test_a_fault_of_one_copy_is_found(pool: Pool, text: Path, tmp_path: Path) -> None:
    line = "zero.stage=3 mesh.replicate=2 precision=fp32"
    report = report_of(pool, text, tmp_path, line, "wrong copy", "layers.1", ranks=4)
    _, hops, last = report.findings
    assert (hops.agrees, last.agrees) == (False, True)
    assert hops.gap.unit == "layers.1"
    assert hops.gap.unit_norm == pytest.approx(1 / 32, rel=0.05)


def test_tiles_are_compared_with_what_was_tiled(pool: Pool, text: Path, tmp_path: Path) -> None:
    report = report_of(pool, text, tmp_path, "zero.stage=0 block.tiles=3 precision=fp32", "tiles left out", "up.weight")
    _, tiled = report.findings
    assert not tiled.agrees
    assert tiled.gap.masters == pytest.approx(1)
    assert ".ffn.up.weight. Expected: a tolerance, since tiles add partial sums" in verdict(report)


def test_keys_whose_gradients_stay_on_their_rank_are_found(pool: Pool, text: Path, tmp_path: Path) -> None:
    report = report_of(pool, text, tmp_path, CUT, "lonely keys")
    _, cut, last = report.findings
    assert (cut.agrees, last.agrees) == (False, True)
    assert "over cut sequences from stage 0 on the device: " in verdict(report)
    assert "gradient norm of unit layers." in verdict(report)


@pytest.mark.product(keep=3)
@pytest.mark.parametrize(
    ("line", "fault", "mark", "param"),
    [
        (
            "zero.stage=2",
            ("wrong divisor", "layers.1"),
            Mark(1, GRAD, "layers.1"),
            "layers.1.attention_norm.weight",
        ),
        (
            "zero.stage=3 offload=host train.accumulate=2",
            ("dropped microbatch", "layers.0"),
            Mark(1, GRAD, "layers.0"),
            "layers.0.attention_norm.weight",
        ),
        ("zero.stage=3", ("skipped data", 3), Mark(1, LOSS), ""),
        (
            "zero.stage=3",  # which gathers twice in a step
            ("stale parameter", "layers.1", 4),
            Mark(3, READ, "layers.1"),
            "layers.1.attention.query.weight",
        ),
        (
            "zero.stage=3 offload=host",
            ("not updated", "layers.0", 1),
            Mark(2, READ, "layers.0"),
            "layers.0.attention.query.weight",
        ),
        (
            "zero.stage=1",
            ("not updated", "layers.1", STEPS),
            Mark(STEPS, MASTER, "layers.1"),
            "layers.1.attention_norm.weight",
        ),
    ],
)
def test_a_planted_fault_is_found_where_it_is(
    pool: Pool, text: Path, tmp_path: Path, line: str, fault: tuple[Any, ...], mark: Mark, param: str
) -> None:
    report = report_of(pool, text, tmp_path, line, *fault)
    assert not report.agrees
    *others, last = report.findings
    assert all(finding.agrees for finding in others)
    assert last.apart is not None
    assert last.apart.mark == mark
    assert last.apart.param == param
    assert last.apart.largest > 0
    told = verdict(report)
    assert f"DIFFERS: {CONFIGURATION} from" in told
    assert f"step {mark.step}" in told
    assert param in told


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (("wrong divisor", "layers.1"), "unit layers.1 in step 1 1.0e+00 where 1.0e-02 is allowed. Expected: a tol"),
        (("not updated", "layers.1", 1), "is allowed, most in layers.1."),
    ],
)
def test_a_fault_is_larger_than_a_tolerance(
    pool: Pool, text: Path, tmp_path: Path, fault: tuple[Any, ...], told: str
) -> None:
    """Stage 2 with two microbatches has no bits to be compared with."""
    report = report_of(pool, text, tmp_path, "zero.stage=2 train.accumulate=2", *fault)
    assert not report.agrees
    assert told in verdict(report)


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("settings", ["train.accumulate=2", "precision=fp32", "precision=fp16 block.tiles=3"])
def test_native_reductions_agree_until_one_units_divisor_is_off_by_one(
    pool: Pool, text: Path, tmp_path: Path, settings: str
) -> None:
    """The loss hardly shows it, and the gradient norm of all units the less the more there are."""
    line = f"zero.stage=3 zero.reduction=native {settings}"
    right = report_of(pool, text, tmp_path, line)
    assert right.agrees, verdict(right)
    assert right.findings[-1].gap.unit_norm < 2e-3
    wrong = report_of(pool, text, tmp_path, line, "wrong divisor", "layers.1", 15 / 16)
    assert not wrong.agrees
    last = wrong.findings[-1]
    assert (last.apart, last.gap.unit, last.gap.step) == (None, "layers.1", 1)
    assert last.gap.unit_norm == pytest.approx(1 / 16, rel=0.05)
    assert f"DIFFERS: {CONFIGURATION} from" in verdict(wrong)
    assert "gradient norm of unit layers.1 in step 1 6." in verdict(wrong)


def test_a_model_with_noise_differs_from_itself_and_its_spread_is_the_measure(
    pool: Pool, text: Path, tmp_path: Path
) -> None:
    noisy = report_of(pool, text, tmp_path, "zero.stage=3 precision=fp32", "noise")
    assert noisy.agrees, verdict(noisy)
    itself, finding = noisy.findings
    assert itself.apart is not None
    assert itself.apart.mark.step == 1
    assert finding.allowed is not None
    assert verdict(noisy).startswith("the baseline differs from itself: step 1")
    wrong = report_of(pool, text, tmp_path, "zero.stage=3 precision=fp32", "noise", "wrong divisor", "layers.1")
    assert not wrong.agrees, verdict(wrong)
    assert verdict(wrong).startswith("the baseline differs from itself: step 1")


# The command


def test_the_command_says_so_and_leaves_nothing(text: Path, tmp_path: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
    env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    own = small(text, "zero.stage=1", "mesh.dp=1", "mesh.pp=2", "mesh.pp_schedule=gpipe", "train.accumulate=2")
    settings = [each for each in own if not each.startswith("launch.workers")]  # the mesh says how many
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "dzero", "verify", *settings),
            *("checkpoint.every=2", "profile=on", "profile.start_step=2", "profile.steps=1"),
        ],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert (ended.returncode, ended.stderr) == (AGREES, "")
    assert ended.stdout.splitlines()[-1].startswith("AGREES: stage 0 on the device over a pipeline and stage 0 on")
    assert "the configuration and stage 0 on the device over a pipeline: the same bits" in ended.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("verify.steps=0", "verify.steps=0: must be a whole number ≥ 1"),
        ("verify.steps=many", "verify.steps=many: must be a whole number"),
        ("verify.step=3", "verify.step: unknown key; verify has ['steps']; did you mean verify.steps=3?"),
        ("verify.steps=9", "verify.steps=9 exceeds train.steps=4; lower it, or raise that"),
        ("zero.stage=4", "zero.stage=4: choose 0, 1, 2 or 3"),
        ("zero.stage", "zero.stage"),
    ],
)
def test_wrong_usage_is_told_and_has_a_code_of_its_own(
    text: Path, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(small(text, setting)) == NOT_COMPARED
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert message in told
