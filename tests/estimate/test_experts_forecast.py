"""Of experts that ranks share: what is predicted, as if all were chosen alike, is what a run takes where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from rank_cases import trained

from dzero.comm.ledger import Traffic
from dzero.config import RunConfig
from dzero.estimate.durations import link_of, of_experts
from dzero.estimate.transfers import moves_of
from dzero.overrides import composed
from dzero.plan.auto import choose
from dzero.plan.meta_model import as_on_a_rank, model_of, units_of
from dzero.plan.plan_run import forecast_run
from dzero.plan.preflight import needed
from dzero.plan.run_layout import layout_of

CONF = Path(__file__).parents[2] / "conf"
VOCABULARY = 512
SMALL = [
    *("model=tiny_moe", "model.hidden_size=128", "model.layers=3", "model.heads=4", "model.kv_heads=2"),
    *("model.ffn_size=96", "model.experts=4", f"model.vocab_size={VOCABULARY}"),
    *("train.microbatch_sequences=2", "train.sequence_tokens=128", "hardware=laptop", "launch.device=cpu"),
]
ALL = "model.top_k=4"  # every token uses every expert, so they are chosen alike
LINES = [
    f"{ALL} zero.stage=3 mesh.dp=4 mesh.ep=2 train.accumulate=2",
    f"{ALL} zero.stage=2 mesh.dp=2 mesh.ep=2 block.activation_checkpoint=full",
    f"{ALL} zero.stage=1 mesh.dp=2 mesh.ep=2 train.accumulate=2 precision=fp32 model.balance=loss",
    f"{ALL} zero.stage=2 mesh.dp=2 offload=host",
    pytest.param(f"{ALL} zero.stage=0 mesh.dp=2 mesh.ep=2", marks=pytest.mark.slow),
    pytest.param(f"{ALL} zero.stage=3 mesh.dp=2 mesh.ep=2 offload=host", marks=pytest.mark.slow),
    pytest.param(f"{ALL} zero.stage=3 mesh.dp=2 mesh.cp=2 mesh.ep=4", marks=pytest.mark.slow),
    pytest.param(f"{ALL} zero.stage=3 mesh.dp=2 block.activation_checkpoint=full", marks=pytest.mark.slow),
    pytest.param(f"{ALL} zero.stage=1 mesh.dp=2 mesh.tp=2 mesh.ep=4 model.balance=loss", marks=pytest.mark.slow),
    pytest.param(f"{ALL} zero.stage=2 mesh.dp=2 mesh.ep=2 zero.units=[Attention]", marks=pytest.mark.slow),
]


def settled(*settings: str) -> RunConfig:
    return composed([*SMALL, *settings], CONF)


def measured(rank: int, ranks: int, run: RunConfig) -> tuple[int, Traffic]:
    """The device's peak in a step, and what the ledger counted of tokens that went to experts."""
    took, moved = trained(run, VOCABULARY)
    return took, sum((each for entry, each in moved.items() if entry.axis == "ep"), Traffic())


@pytest.mark.full
@pytest.mark.parametrize("line", LINES)
def test_the_peak_and_what_tokens_move_are_predicted(pool: Pool, line: str) -> None:
    run = settled(*line.split())
    assert run.mesh.ranks is not None
    assert run.hardware is not None
    told = pool.run(measured, run.mesh.ranks, run, timeout_s=300)
    moved, memory = forecast_run(run, run.hardware).moved, needed(run)
    predicted = memory.peak.total_bytes + memory.staging
    for peak, routed in told:
        assert (moved.calls.get("ep", 0), moved.axes.get("ep", 0)) == (routed.calls, routed.sent_bytes)
        print(f"peak {peak}, predicted {predicted / peak - 1:+.1%}")
        assert -0.02 < predicted / peak - 1 < 0.07


def test_a_plan_has_a_lane_for_tokens_that_move() -> None:
    run = settled("mesh.dp=16", "mesh.ep=4", "hardware=h100_80g")
    assert run.hardware is not None
    forecast = forecast_run(run, run.hardware)
    timeline = forecast.timeline()
    assert timeline is not None
    assert timeline.busy_s()["ep"] == pytest.approx(forecast.pace.seconds["ep"])


@pytest.mark.parametrize("offload", ["none", "host"])
def test_every_element_is_updated_by_one_of_the_ranks_that_have_it(offload: str) -> None:
    config = settled("mesh.dp=4", "mesh.ep=2", "zero.stage=2", f"offload={offload}")
    model = model_of(config)
    with as_on_a_rank(config, model) as rank:
        units = units_of(config, model, rank)
    layout = layout_of(config, "cpu")
    for unit, moves in zip(units, moves_of(layout, units).values(), strict=True):
        own = unit.shard_elems(layout.of_unit(unit).shard)
        assert moves.device_elems + moves.host_elems == own
        assert moves.grad == (own * layout.grad.dtype.itemsize if offload == "host" else 0)


def test_experts_are_reduced_over_the_link_between_those_that_have_the_same() -> None:
    """16 ranks of two nodes, 8 of which share experts: the two that have the same are of different nodes."""
    run = settled("mesh.dp=16", "mesh.ep=8", "model.experts=8", "hardware=h100_80g", "zero.stage=2")
    assert run.hardware is not None
    forecast = forecast_run(run, run.hardware)
    own, beside = forecast.layout, forecast.costs.beside
    assert link_of(own, run.hardware, "shard", beside).rate == run.hardware.link(16, world=16)
    assert link_of(own, run.hardware, of_experts("shard"), beside).rate == run.hardware.link(2, stride=8, world=16)
    assert run.hardware.link(2, stride=8, world=16) != run.hardware.link(16, world=16)
    timeline = forecast.timeline()
    assert timeline is not None
    assert timeline.busy_s()["shard"] == pytest.approx(forecast.pace.seconds["shard"])


@pytest.mark.parametrize("line", ["zero.units=[Attention]", "mesh.tp=2 model.balance=loss", "block.loss_tiles=2"])
def test_what_trains_is_foreseen(line: str) -> None:
    assert needed(settled("mesh.dp=2", "mesh.ep=2", *line.split())).peak.total_bytes > 0


def test_ranks_that_share_experts_have_fewer_bytes_of_them() -> None:
    """At stage 0 with half of the experts each; the rest of the model is whole."""
    shared, whole = (
        needed(settled("mesh.dp=2", "mesh.ep=2", "zero.stage=0")),
        needed(settled("mesh.dp=2", "zero.stage=0")),
    )
    of_experts = 3 * 4 * 3 * 128 * 96
    for kind, itemsize in (("param", 2), ("master", 4), ("moments", 8)):
        assert whole.peak.kinds[kind] - shared.peak.kinds[kind] == of_experts // 2 * itemsize


def test_auto_finds_what_fits_a_mixture() -> None:
    run = settled("mesh.dp=2", "mesh.ep=2", "zero=auto", "train.accumulate=null", "train.global_sequences=8")
    choice = choose(run, ["zero=auto"])
    assert choice.config.mesh == run.mesh
    assert choice.ranking.best[0].forecast.moved.axes["ep"] > 0
