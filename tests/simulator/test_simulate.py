"""A simulated rank holds, moves and does what a real one does, to the byte; many equal blocks are a few, repeated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from pool import Pool
from rank_cases import piped, really
from simulator.observe import Observed
from simulator.scenario import Scenario
from simulator.simulate import Simulated, simulate
from simulator.storage_meter import KINDS

from dzero import OffloadConfig, PrecisionConfig, ZeroConfig
from dzero.comm.ledger import Traffic
from dzero.mesh_config import MeshConfig
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.zero.cost_model import resting_bytes

TWO_BLOCKS = ModelConfig(vocab_size=256, hidden_size=64, layers=2, heads=4, kv_heads=2, ffn_size=128)
HOST = OffloadConfig(grad="host", master="host", moments="host")


def scenario(*, layers: int = 2, recompute: str = "none", stage: int = 2, **settings: Any) -> Scenario:
    """A tiny llama, in the CPU's default reduction (exact)."""
    given: dict[str, Any] = {"ranks": 2, "sequences": 2, "tokens": 32, "device_type": "cpu", **settings}
    given.setdefault("zero", ZeroConfig(stage=stage))
    given.setdefault("block", BlockConfig(activation_checkpoint=recompute))
    return Scenario(model=replace(TWO_BLOCKS, layers=layers), **given)


def differences(simulated: Simulated, real: Observed) -> list[str]:
    """What is not the same: when most is held, how much of what kind, the actions, the traffic."""
    parts = {
        "peak": (simulated.peak, real.peak),
        "actions": (simulated.actions, real.actions),
        "traffic": (simulated.traffic, real.traffic),
    }
    return [f"{key}: {a} but really {b}" for key, (a, b) in parts.items() if a != b]


def held_against(pool: Pool, cases: list[Scenario]) -> None:
    measured, _ = pool.run(really, 2, cases, timeout_s=600.0)
    for case, real in zip(cases, measured, strict=True):
        assert differences(simulate(case), real) == [], case


PRODUCT = [*itertools.product((0, 1, 2, 3), (1, 2), ("none", "full"))]
PAIRWISE = [cell for cell in PRODUCT if (cell[0] + cell[1] + (cell[2] == "full")) % 2]


@pytest.mark.full
def test_a_simulated_step_holds_and_does_what_a_real_one_does(pool: Pool) -> None:
    """Every pair of settings once or more; all of them in the slow test."""
    held_against(pool, [scenario(stage=s, accumulate=a, recompute=r) for s, a, r in PAIRWISE])


@pytest.mark.slow
def test_so_it_does_at_every_stage_with_every_accumulation_and_recomputation(pool: Pool) -> None:
    held_against(pool, [scenario(stage=s, accumulate=a, recompute=r) for s, a, r in PRODUCT])


@pytest.mark.full
def test_so_it_does_with_other_dtypes_hybrid_meshes_tiles_and_native_collectives(pool: Pool) -> None:
    native = ZeroConfig(stage=3, reduction="native", reshard_after_forward=False)
    cases = [
        scenario(stage=3, precision=PrecisionConfig(param="fp32")),
        scenario(stage=2, precision=PrecisionConfig(master="remainder", moments="bf16"), accumulate=2),
        # gloo's own reduce-scatter works on a copy of what it is given: in fp32, native's default, that is the peak.
        scenario(zero=native, recompute="selective", precision=PrecisionConfig(reduce="bf16")),
        scenario(stage=3, block=BlockConfig(tiles=2, loss_tiles=2, activation_checkpoint="full")),
        scenario(stage=1, max_norm=None, sequences=1, tokens=200),
    ]
    held_against(pool, cases)


@pytest.mark.full
@pytest.mark.product(keep=1)
@pytest.mark.parametrize("balance", ["auxiliary-loss-free", "loss"])
def test_a_mixture_is_simulated_as_if_its_experts_were_chosen_alike(pool: Pool, balance: str) -> None:
    """As they are where a token uses all of them."""
    kind = {"kind": "moe", "experts": 4, "top_k": 4, "shared_experts": 1, "balance": balance}
    cells = ((1, 2, "none", 1), (2, 1, "full", 2)) if balance == "loss" else ((2, 1, "full", 1), (3, 2, "none", 2))
    cases = [
        scenario(stage=stage, accumulate=count, recompute=recompute, mesh=MeshConfig(ep=ep))
        for stage, count, recompute, ep in cells
    ]
    held_against(pool, [replace(case, model=replace(case.model, **kind)) for case in cases])


PIPED = [
    scenario(layers=4, stage=2, accumulate=4, mesh=MeshConfig(pp=2), sequences=8),
    scenario(layers=4, stage=1, accumulate=4, mesh=MeshConfig(pp=2), ranks=4, recompute="full"),
    scenario(layers=5, stage=3, accumulate=3, mesh=MeshConfig(pp=2, pp_schedule="gpipe"), ranks=4, recompute="full"),
]


@pytest.mark.product(keep=1)
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
    "stage 0": scenario(layers=5, stage=0, accumulate=2),
    "stage 1": scenario(layers=5, stage=1, accumulate=2, recompute="full"),
    "stage 2": scenario(layers=5, stage=2, recompute="full", device_type="cuda"),
    "stage 3": scenario(layers=5, stage=3, accumulate=2, recompute="full", device_type="cuda"),
    "hybrid": scenario(layers=5, stage=3, ranks=4, mesh=MeshConfig(replicate=2)),
    "partly resharded": scenario(layers=5, ranks=4, zero=ZeroConfig(stage=3, reshard_after_forward=2)),
    "tiled": scenario(layers=5, stage=3, block=BlockConfig(tiles=2)),
    "host": scenario(layers=5, stage=2, accumulate=2, offload=HOST),
}


FEW = ("stage 3", "hybrid", "host")


@pytest.mark.full
@pytest.mark.product(keep=1)
@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in REPEATED]
)
def test_many_equal_blocks_are_three_and_four_repeated(name: str) -> None:
    repeated, whole = simulate(REPEATED[name]), simulate(REPEATED[name], whole=True)
    assert repeated.peak == whole.peak
    assert repeated.actions == whole.actions
    assert repeated.traffic == whole.traffic


def test_the_kinds_of_a_peak_are_the_tables() -> None:
    """At stage 3 with one microbatch: states as the table counts them, on a rank whose shards are full."""
    case = scenario(stage=3, ranks=4)
    result = simulate(case)
    shapes = result.shapes
    rest = resting_bytes(case.layout(), shapes)
    held = dict(zip(KINDS, result.peak.bytes, strict=True))
    assert (held["param"], held["master"], held["moments"]) == (rest.param, rest.master, rest.moments)
    assert held["unsharded"] > 0
    assert held["activations"] > 0


def test_states_off_the_device_leave_the_rest_of_a_peak_as_it_is() -> None:
    here, away = simulate(scenario(stage=2)), simulate(scenario(stage=2, offload=HOST))
    held, left = (dict(zip(KINDS, each.peak.bytes, strict=True)) for each in (here, away))
    assert left["master"] == left["moments"] == 0
    assert {k: held[k] for k in ("param", "activations")} == {k: left[k] for k in ("param", "activations")}
    assert away.actions == here.actions
    assert here.schedule.host_bytes == 0
    assert away.schedule.host_bytes >= held["master"] + held["moments"]


def test_parameters_off_the_device_come_two_units_at_a_time() -> None:
    away = OffloadConfig(param="host", grad="host", master="disk", moments="disk")
    result = simulate(scenario(stage=3, offload=away, ranks=4))
    block, root = (sum(p.elems for p in unit.params) // 4 * 2 for unit in result.shapes[-2:])  # bf16, a quarter
    assert dict(zip(KINDS, result.peak.bytes, strict=True))["param"] == max(2 * block, root + block)
    assert result.schedule.disk_bytes > 0


@pytest.mark.parametrize("ranks", [1024, pytest.param(16384, marks=pytest.mark.slow)])
def test_a_rank_of_thousands_moves_what_the_table_says(ranks: int) -> None:
    """The small model: most of its shards are empty. `simulate` itself holds the ledger against the table."""
    result = simulate(scenario(layers=12, stage=3, ranks=ranks, device_type="cuda", accumulate=2))
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
    assert len(unsharded) == 2 * (13 + 12)  # the root stays gathered for backward


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ValueError, match="activations=host: what waits off the device"):
        scenario(offload=OffloadConfig(activations="host"))
    with pytest.raises(ValueError, match="ranks=0"):
        scenario(ranks=0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="this process is in one"):
            simulate(scenario())
    finally:
        dist.destroy_process_group()
