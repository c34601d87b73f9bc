"""Runs far larger than this machine, simulated on a fake group: they fit, and say what they move along every axis."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from rank_cases import scenario_of
from simulator.scenario import Scenario
from simulator.simulate import Simulated, simulate

CONF = Path(__file__).parents[2] / "conf" / "model"
H100_BYTES = 80_000_000_000


def large(model: str, accumulate: int, stage: int, ranks: int, **mesh: int) -> Scenario:
    """One sequence of 4,096 tokens to a microbatch, in bf16, blocks recomputed."""
    return scenario_of(
        model=yaml.safe_load((CONF / f"{model}.yaml").read_text()),
        mesh=mesh,
        block={"activation_checkpoint": "full"},
        ranks=ranks,
        sequences=1,
        tokens=4096,
        accumulate=accumulate,
        stage=stage,
        device_type="cuda",
    )


def sent(simulated: Simulated) -> dict[str, int]:
    """Bytes by phase and axis."""
    totals: dict[str, int] = {}
    for entry, traffic in simulated.traffic.items():
        key = f"{entry.phase} {entry.axis}"
        totals[key] = totals.get(key, 0) + traffic.sent_bytes
    return totals


def of_the_loss(microbatches: int) -> int:
    """Bytes along tp: three all-reduces of fp32, a number for every token."""
    return microbatches * 3 * 2 * 7 * 4096 * 4 // 8


def of_norms(width: int, *, count: int, reductions: int) -> int:
    """Bytes along tp: their gradients in bf16, all-reduced."""
    return reductions * count * 2 * 7 * width * 2 // 8


@pytest.mark.full("tests/simulator/test_simulate.py::test_a_rank_of_thousands_moves_what_the_table_says")
def test_70_billion_on_64_x_8_fit_and_tell_their_traffic() -> None:
    simulated = simulate(large("llama_70b", 2, 3, ranks=512, dp=64, tp=8))
    assert simulated.peak.total < H100_BYTES
    of_a_rank = sum(param.elems for unit in simulated.shapes for param in unit.params)
    gathers, reduces = 2 * 2, 2  # of bf16, forward and backward of two microbatches; of fp32, which nccl sums
    moved = sent(simulated)
    # Uneven rows are padded.
    assert moved["unshard shard"] == pytest.approx(gathers * 2 * of_a_rank * 63 / 64, rel=0.01)
    assert moved["reduce shard"] == pytest.approx(reduces * 4 * of_a_rank * 63 / 64, rel=0.01)
    parts, hidden = 2 * (80 * 11 + 4), 4096 * 8192 * 2  # per microbatch and block, and at the model's ends
    assert moved["tensor tp"] == parts * hidden * 7 // 8 + of_the_loss(2) + of_norms(8192, count=161, reductions=2)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 7, 15])
def test_a_trillion_on_32_x_16_x_8_fit_and_tell_their_traffic(part: int) -> None:
    simulated = simulate(large("llama_1t", 16, 2, ranks=4096, dp=32, pp=16, tp=8), part=part)
    assert simulated.peak.total < H100_BYTES
    of_a_rank = sum(param.elems for unit in simulated.shapes for param in unit.params)
    hidden, ways = 4096 // 8 * 25_600 * 2, 1 if part in (0, 15) else 2
    moved = sent(simulated)
    assert moved["pipeline pp"] == ways * 16 * hidden
    assert moved["unshard shard"] == pytest.approx(2 * of_a_rank * 31 / 32, rel=0.01)
    assert moved["reduce shard"] == pytest.approx(16 * 4 * of_a_rank * 31 / 32, rel=0.01)
    blocks = sum(unit.name.startswith("layers.") for unit in simulated.shapes)
    first, last = part == 0, part == 15
    ends, norms = 2 * (first + last), of_norms(25_600, count=2 * blocks + last, reductions=16)
    due = 16 * (blocks * 11 + ends) * 8 * hidden * 7 // 8 + last * of_the_loss(16) + norms
    assert moved["tensor tp"] == due
