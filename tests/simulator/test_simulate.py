"""A simulated rank holds, moves and does what a real one does, to the byte; many equal blocks are a few, repeated."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml
from pool import Pool
from rank_cases import piped, really, scenario_of
from simulator.observe import Observed
from simulator.scenario import Scenario
from simulator.simulate import Simulated, simulate
from simulator.storage_meter import KINDS

from dzero import OffloadConfig, PrecisionConfig, ZeroConfig
from dzero.testing import Traffic

CONF = Path(__file__).parents[2] / "conf" / "model"
H100_BYTES = 80_000_000_000
HOST = OffloadConfig(grad="host", master="host", moments="host")
FULL = {"activation_checkpoint": "full"}
MET = "tests/simulator/test_simulate.py::test_a_simulated_step_holds_and_does_what_a_real_one_does"


def blocks(count: int) -> dict[str, Any]:
    """The tiny model with so many blocks."""
    return {"layers": count}


def differences(simulated: Simulated, real: Observed | Simulated) -> list[str]:
    """What is not the same: when most is held, how much of what kind, the actions, the traffic."""
    parts = {
        "peak": (simulated.peak, real.peak),
        "actions": (simulated.actions, real.actions),
        "traffic": (simulated.traffic, real.traffic),
    }
    return [f"{key}: {a} but really {b}" for key, (a, b) in parts.items() if a != b]


PRODUCT = [
    scenario_of(stage=stage, accumulate=accumulate, block={} if (stage + accumulate) % 2 else FULL)
    for stage, accumulate in itertools.product((0, 1, 2, 3), (1, 2))
]
EXPERTS = {"kind": "moe", "experts": 4, "top_k": 4, "shared_experts": 1}
"""Chosen alike by every token, as a simulation assumes."""
GROUPS = {
    "one step": [scenario_of(stage=3, accumulate=2, block=FULL)],
    "stages, accumulations and recomputation": PRODUCT,
    "dtypes, tiles and native collectives": [
        scenario_of(stage=3, precision=PrecisionConfig(param="fp32")),
        scenario_of(precision=PrecisionConfig(master="remainder", moments="bf16"), accumulate=2),
        # gloo's own reduce-scatter works on a copy of what it is given: in fp32, native's default, that is the peak.
        scenario_of(
            zero=ZeroConfig(stage=3, reduction="native", reshard_after_forward=False),
            block={"activation_checkpoint": "selective"},
            precision=PrecisionConfig(reduce="bf16"),
        ),
        scenario_of(stage=3, block={"tiles": 2, "loss_tiles": 2, **FULL}),
        scenario_of(stage=1, max_norm=None, sequences=1, tokens=200),
    ],
    "experts": [
        scenario_of(model={**EXPERTS, "balance": balance}, stage=stage, accumulate=count, block=block, mesh={"ep": ep})
        for balance, stage, count, block, ep in (
            ("loss", 1, 2, {}, 1),
            ("loss", 2, 1, FULL, 2),
            ("auxiliary-loss-free", 2, 1, FULL, 1),
            ("auxiliary-loss-free", 3, 2, {}, 2),
        )
    ],
}


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("group", GROUPS)
def test_a_simulated_step_holds_and_does_what_a_real_one_does(pool: Pool, group: str) -> None:
    measured, _ = pool.run(really, 2, GROUPS[group], timeout_s=600.0)
    for case, real in zip(GROUPS[group], measured, strict=True):
        assert differences(simulate(case), real) == [], case


PIPED = [
    scenario_of(model=blocks(4), stage=2, accumulate=4, mesh={"pp": 2}, sequences=8),
    scenario_of(model=blocks(5), stage=3, accumulate=3, mesh={"pp": 2, "pp_schedule": "gpipe"}, ranks=4, block=FULL),
]


@pytest.mark.full(MET)
@pytest.mark.parametrize("case", PIPED, ids=lambda case: f"{case.mesh.pp_schedule}-stage{case.zero.stage}")
def test_a_part_of_a_pipeline_moves_what_it_really_does_and_holds_as_much(pool: Pool, case: Scenario) -> None:
    """But for what torch's schedule keeps of a microbatch while the next one is sent."""
    told = pool.run(piped, case.ranks, case, timeout_s=300)
    for part in range(2):
        simulated = simulate(case, part=part)
        held, moved = told[part * case.ranks // 2]
        assert simulated.traffic == moved
        assert simulated.peak.total == pytest.approx(held, rel=0.03)


REPEATED = {
    "stage 3": {"stage": 3, "accumulate": 2, "block": FULL, "device_type": "cuda"},
    "hybrid": {"stage": 3, "ranks": 4, "mesh": {"replicate": 2}},
    "host": {"stage": 2, "accumulate": 2, "offload": HOST},
    "stage 1": {"stage": 1, "accumulate": 2, "block": FULL},
    "partly resharded": {"ranks": 4, "zero": ZeroConfig(stage=3, reshard_after_forward=2)},
    "tiled": {"stage": 3, "block": {"tiles": 2}},
}


@pytest.mark.full("tests/simulator/test_simulate.py::test_a_rank_of_thousands_moves_what_the_table_says")
@pytest.mark.parametrize("name", REPEATED)
def test_many_equal_blocks_are_three_and_four_repeated(name: str) -> None:
    case = scenario_of(model=blocks(5), **REPEATED[name])
    assert differences(simulate(case), simulate(case, whole=True)) == []


def kinds(simulated: Simulated) -> dict[str, int]:
    """Bytes of each kind in the moment in which most is held."""
    return dict(zip(KINDS, simulated.peak.bytes, strict=True))


def test_the_kinds_of_a_peak_are_the_tables() -> None:
    """At stage 3 of four ranks with one microbatch; every dim is a multiple of 4, so that no shard is padded."""
    result = simulate(scenario_of(stage=3, ranks=4))
    held, elems = kinds(result), sum(param.elems for unit in result.shapes for param in unit.params) // 4
    assert (held["param"], held["master"], held["moments"]) == (2 * elems, 4 * elems, 8 * elems)
    assert held["unsharded"] > 0
    assert held["activations"] > 0


def test_states_off_the_device_leave_the_rest_of_a_peak_as_it_is() -> None:
    here, away = simulate(scenario_of()), simulate(scenario_of(offload=HOST))
    held, left = kinds(here), kinds(away)
    assert left["master"] == left["moments"] == 0
    assert {k: held[k] for k in ("param", "activations")} == {k: left[k] for k in ("param", "activations")}
    assert away.actions == here.actions
    assert here.schedule.host_bytes == 0
    assert away.schedule.host_bytes >= held["master"] + held["moments"]


def test_parameters_off_the_device_come_two_units_at_a_time() -> None:
    away = OffloadConfig(param="host", grad="host", master="disk", moments="disk")
    result = simulate(scenario_of(stage=3, offload=away, ranks=4))
    block, root = (sum(p.elems for p in unit.params) // 4 * 2 for unit in result.shapes[-2:])  # bf16, a quarter
    assert kinds(result)["param"] == max(2 * block, root + block)
    assert result.schedule.disk_bytes > 0


@pytest.mark.parametrize("ranks", [1024, pytest.param(16384, marks=pytest.mark.slow)])
def test_a_rank_of_thousands_moves_what_the_table_says(ranks: int) -> None:
    """The small model: most of its shards are empty. `simulate` itself holds the ledger against the table."""
    result = simulate(scenario_of(model=blocks(12), stage=3, ranks=ranks, device_type="cuda"))
    params = 12 * 9 + 3  # of 9 parameters a block and 3 of the root; in fp64, with a checksum
    if ranks * (1 + params) * 8 <= 4 << 20:
        control = {"all_gather": Traffic(1, (ranks - 1) * 8 * (1 + params))}
    else:
        slice_ = -(-params // ranks)
        control = {
            "all_to_all": Traffic(1, (ranks - 1) * 8 * (1 + slice_)),
            "all_gather": Traffic(1, (ranks - 1) * 8 * slice_),
        }
    assert {entry.kind: each for entry, each in result.traffic.items() if entry.phase == "control"} == control
    unsharded = [action.unit for action in result.actions if action.what == "unshard"]
    assert unsharded[:13] == ["root", *(f"layers.{index}" for index in range(12))]
    assert len(unsharded) == 13 + 12  # the root stays gathered for backward


def sent(simulated: Simulated) -> dict[str, int]:
    """Bytes by phase and axis."""
    totals: dict[str, int] = {}
    for entry, traffic in simulated.traffic.items():
        key = f"{entry.phase} {entry.axis}"
        totals[key] = totals.get(key, 0) + traffic.sent_bytes
    return totals


LARGE: list[tuple[str, int, int, dict[str, int], int]] = [
    ("llama_70b", 3, 2, {"dp": 64, "tp": 8}, 0),
    *(("llama_1t", 2, 16, {"dp": 32, "pp": 16, "tp": 8}, part) for part in (0, 7, 15)),
]


@pytest.mark.full("tests/simulator/test_simulate.py::test_a_rank_of_thousands_moves_what_the_table_says")
@pytest.mark.parametrize(
    ("name", "stage", "microbatches", "mesh", "part"),
    [pytest.param(*case, marks=pytest.mark.slow if "pp" in case[3] else ()) for case in LARGE],
)
def test_large_models_on_many_axes_fit_and_tell_their_traffic(
    name: str, stage: int, microbatches: int, mesh: dict[str, int], part: int
) -> None:
    """One sequence of 4,096 tokens to a microbatch, in bf16, blocks recomputed."""
    model = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    cut: dict[str, Any] = {"mesh": mesh, "ranks": math.prod(mesh.values()), "stage": stage, "device_type": "cuda"}
    case = scenario_of(model=model, block=FULL, sequences=1, tokens=4096, accumulate=microbatches, **cut)
    simulated = simulate(case, part=part)
    assert simulated.peak.total < H100_BYTES
    of_a_rank = sum(param.elems for unit in simulated.shapes for param in unit.params)
    first, last, of_others = part == 0, part == mesh.get("pp", 1) - 1, (mesh["dp"] - 1) / mesh["dp"]
    gathers = 2 * microbatches if stage == 3 else 1  # of bf16; sums are of fp32, as nccl makes them
    moved = sent(simulated)
    # Uneven rows are padded.
    assert moved["unshard shard"] == pytest.approx(gathers * 2 * of_a_rank * of_others, rel=0.01)
    assert moved["reduce shard"] == pytest.approx(microbatches * 4 * of_a_rank * of_others, rel=0.01)
    hidden = 4096 * model["hidden_size"] * 2
    assert moved.get("pipeline pp", 0) == (2 - first - last) * microbatches * hidden // 8  # forth and back
    blocks = sum(unit.name.startswith("layers.") for unit in simulated.shapes)
    of_blocks = (11 * blocks + 2 * (first + last)) * hidden
    of_the_loss = last * 3 * 2 * 4096 * 4  # three all-reduces of fp32, of a number for every token
    of_norms = (2 * blocks + last) * 2 * model["hidden_size"] * 2  # their gradients in bf16, all-reduced
    assert moved["tensor tp"] == microbatches * (of_blocks + of_the_loss + of_norms) * 7 // 8


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="activations=host: what waits off the device"):
        scenario_of(offload=OffloadConfig(activations="host"))
    with pytest.raises(ValueError, match="ranks=0"):
        scenario_of(ranks=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="this process is in one"):
            simulate(scenario_of())
    finally:
        dist.destroy_process_group()
