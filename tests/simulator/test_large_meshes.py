"""Runs far larger than this machine, simulated on a fake group: they fit, and say what they move along every axis."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from simulator.scenario import Scenario
from simulator.simulate import Simulated, simulate

from dzero import ZeroConfig
from dzero.mesh_config import MeshConfig
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig

CONF = Path(__file__).parents[2] / "conf" / "model"
H100_BYTES = 80_000_000_000


def large(model: str, mesh: MeshConfig, accumulate: int, stage: int) -> Scenario:
    """One sequence of 4,096 tokens to a microbatch, in bf16, blocks recomputed."""
    ranks = mesh.ranks
    assert ranks is not None
    return Scenario(
        model=ModelConfig(**yaml.safe_load((CONF / f"{model}.yaml").read_text())),
        ranks=ranks,
        sequences=1,
        tokens=4096,
        accumulate=accumulate,
        zero=ZeroConfig(stage=stage),
        mesh=mesh,
        block=BlockConfig(activation_checkpoint="full"),
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


@pytest.mark.full
def test_70_billion_on_64_x_8_fit_and_tell_their_traffic() -> None:
    scenario = large("llama_70b", MeshConfig(dp=64, tp=8), accumulate=2, stage=3)
    simulated = simulate(scenario)
    assert simulated.peak.total < H100_BYTES
    of_a_rank = sum(param.elems for unit in simulated.shapes for param in unit.params)
    gathers, reduces = 2 * 2, 2  # of bf16, forward and backward of two microbatches; of fp32, which nccl sums
    moved = sent(simulated)
    assert moved["unshard shard"] == pytest.approx(
        gathers * 2 * of_a_rank * 63 / 64, rel=0.01
    )  # uneven rows are padded
    assert moved["reduce shard"] == pytest.approx(reduces * 4 * of_a_rank * 63 / 64, rel=0.01)
    parts, hidden = 2 * (80 * 11 + 4), 4096 * 8192 * 2  # per microbatch and block, and at the model's ends
    assert moved["tensor tp"] == parts * hidden * 7 // 8 + of_the_loss(2) + of_norms(8192, count=161, reductions=2)


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 7, 15])
def test_a_trillion_on_32_x_16_x_8_fit_and_tell_their_traffic(part: int) -> None:
    scenario = large("llama_1t", MeshConfig(dp=32, pp=16, tp=8), accumulate=16, stage=2)
    simulated = simulate(scenario, part=part)
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
