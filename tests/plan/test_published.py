"""Expected seconds against what others published of runs on the same hardware, and which seconds are which."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from in_process import dzero

from dzero.estimate.forecast import Forecast
from dzero.overrides import composed
from dzero.plan.plan_run import forecast_run

CONF = Path(__file__).parents[2] / "conf"
SEQUENCE = ["zero.stage=3", "train.sequence_tokens=8192", "train.microbatch_sequences=1"]
SEVENTY = ["model=llama_70b", "mesh.dp=64", "block.activation_checkpoint=full"]


def foreseen(*settings: str) -> Forecast:
    config = composed([*SEQUENCE, *settings], CONF)
    assert config.hardware is not None
    return forecast_run(config, config.hardware)


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "tokens_per_s", "mfu"),
    [  # torchtitan, docs/performance.md, 2024: tokens/s of each of 64 A100 80 GB, and MFU
        (["model=llama_8b", "mesh.dp=64", "block.activation_checkpoint=selective"], 2973, 0.582),
        (SEVENTY, 331, 0.517),
    ],
)
def test_what_is_expected_of_64_a100_is_within_5_percent_of_what_torchtitan_measured(
    settings: list[str], tokens_per_s: float, mfu: float
) -> None:
    found = foreseen("hardware=a100_80g", *settings)
    assert found.tokens_per_s is not None
    assert found.tokens_per_s / 64 == pytest.approx(tokens_per_s, rel=0.05)
    assert found.mfu == pytest.approx(mfu, rel=0.05)


def test_what_is_expected_of_8_h100_lies_between_torchtitans_runs_without_and_with_compile() -> None:
    """Benchmarks of 2024-12: 5,762 and 6,667 tokens/s of each GPU; MFU of 33 to 39 %, by the peak that stands here."""
    found = foreseen("hardware=h100_80g", "model=llama_8b", "mesh.dp=8", "block.activation_checkpoint=selective")
    assert found.tokens_per_s is not None
    assert 5762 < found.tokens_per_s / 8 < 6667
    assert found.mfu is not None
    assert 0.33 < found.mfu < 0.39


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    ("compute", "tokens_per_s"),
    [("fp8_tensorwise", 7689.5), ("param", 6150), ("fp8_rowwise", 6768)],
)
def test_products_in_8_bits_are_within_6_percent_of_what_torchao_measured(compute: str, tokens_per_s: float) -> None:
    """torchao, docs of float8, 2025: tokens/s of each of 8 H100; what is compiled, and tensorwise gathers in 8 bits."""
    line = ["hardware=h100_80g", "model=llama_8b", "mesh.dp=8", "block.activation_checkpoint=selective"]
    found = foreseen(*line, f"precision.compute={compute}")
    assert found.tokens_per_s is not None
    assert found.tokens_per_s / 8 == pytest.approx(tokens_per_s, rel=0.06)


def test_the_plan_prints_a_lower_bound_beside_what_is_expected_and_says_what_each_assumes() -> None:
    run = dzero("plan", *SEVENTY, *SEQUENCE, "train.sequence_tokens=4096", "hardware=h100_80g")
    assert run.returncode == 0, run.stderr
    (step,) = re.findall(r"a step +([\d.]+) ms +([\d.]+) ms +MFU (\d+)%", run.stdout)
    bound_ms, expected_ms, mfu = map(float, step)
    assert bound_ms < 0.7 * expected_ms
    assert 33 <= mfu <= 41, "nobody reports more of 64 H100 with full recomputation"
    assert re.search(r"what +lower bound +expected", run.stdout)
    assert re.search(r"lower bound +datasheet rates", run.stdout)
    assert re.search(r"expected +assuming products at 55% of the peak", run.stdout)
    assert re.search(r"MFU +.*recomputation is not counted; with it \d\d% of the peak", run.stdout)


def test_rates_that_were_measured_have_no_lower_bound_beside_them() -> None:
    efficiencies = [f"hardware.{part}efficiency=1" for part in ("", "memory_", "link_")]
    run = dzero("plan", "mesh.dp=2", "hardware=laptop", *efficiencies)
    assert "at the rates that it showed" in run.stdout
    assert "lower bound" not in run.stdout
