"""Of sequences that are cut over ranks: what is predicted is what a run takes, and passes on between its ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from rank_cases import trained

from dzero.comm.ledger import Traffic
from dzero.config import RunConfig
from dzero.hardware import format_bytes
from dzero.overrides import composed
from dzero.plan.auto import choose
from dzero.plan.plan_run import explain_run, forecast_run
from dzero.plan.preflight import needed

CONF = Path(__file__).parents[2] / "conf"
VOCABULARY = 512
SMALL = [
    *("model.hidden_size=128", "model.layers=3", "model.heads=4", "model.kv_heads=2", "model.ffn_size=256"),
    *(f"model.vocab_size={VOCABULARY}", "train.microbatch_sequences=2", "train.sequence_tokens=128", "mesh.cp=2"),
    *("hardware=laptop", "launch.device=cpu"),
]
LINES = [
    "zero.stage=3 train.accumulate=2 mesh.dp=1",
    "zero.stage=2 mesh.dp=1 mesh.cp_attention=ulysses block.activation_checkpoint=full",
    "zero.stage=1 mesh.dp=1 block.activation_checkpoint=selective precision=fp32",
    "zero.stage=3 mesh.dp=1 train.sequence_tokens=1280 train.microbatch_sequences=1",  # in tiles, which share a mask
    "zero.stage=2 mesh.dp=1 mesh.cp_attention=ring train.accumulate=2",
    pytest.param("zero.stage=2 mesh.dp=1 mesh.tp=2", marks=pytest.mark.slow),
    pytest.param("zero.stage=0 mesh.dp=2 mesh.cp_attention=ulysses", marks=pytest.mark.slow),
]


def settled(*settings: str) -> RunConfig:
    return composed([*SMALL, *settings], CONF)


def measured(rank: int, ranks: int, run: RunConfig) -> tuple[int, list[Traffic]]:
    """The device's peak in a step, and what the ledger counted of its attention."""
    took, moved = trained(run, VOCABULARY)
    return took, [traffic for entry, traffic in moved.items() if entry.phase == "context"]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize("line", LINES)
def test_the_peak_and_what_is_passed_on_along_cp_are_predicted(pool: Pool, line: str) -> None:
    run = settled(*line.split())
    assert run.mesh.ranks is not None
    assert run.hardware is not None
    told = pool.run(measured, run.mesh.ranks, run, timeout_s=300)
    moved, memory = forecast_run(run, run.hardware).moved, needed(run)
    predicted = memory.peak.total_bytes + memory.staging
    for peak, passed in told:
        booked = sum(passed, Traffic())
        assert (moved.calls["cp"], moved.axes["cp"]) == (booked.calls, booked.sent_bytes)
        print(f"peak {peak}, predicted {predicted / peak - 1:+.1%}")
        assert -0.02 < predicted / peak - 1 < 0.07  # too much where blocks are recomputed


def test_a_step_reads_as_many_tokens_as_its_readers_do() -> None:
    """Four data-parallel ranks, two to a sequence: 2 readers x 2 sequences x 128 tokens."""
    run = settled("mesh.dp=2", "hardware=h100_80g")
    assert run.hardware is not None
    forecast = forecast_run(run, run.hardware)
    assert forecast.layout.world == 4
    assert forecast.step_tokens == 2 * 2 * 128
    timeline = forecast.timeline()
    assert timeline is not None
    assert timeline.busy_s()["cp"] == pytest.approx(forecast.pace.seconds["cp"])


def test_explain_tells_what_attention_passes_on() -> None:
    """3 blocks, 2 microbatches; to the other rank: keys and values of 2 x 64 tokens, 2 heads of 32 dims, in bf16."""
    settings = ["mesh.dp=1", "train.accumulate=2", "zero.stage=2"]
    tables, _ = explain_run(settled(*settings), [*SMALL, *settings], CONF)
    sent = format_bytes(3 * 2 * 2 * (2 * 64 * 2 * 32) * 2)
    assert tables[-1].rows == tuple((kind, "cp", "bfloat16", "6", sent) for kind in ("all_gather", "reduce_scatter"))


def test_longer_sequences_fit_where_they_are_cut() -> None:
    """Activations are a rank's own tokens'; states are as large as on as many data-parallel ranks."""
    cut, whole = needed(settled("mesh.dp=1")), needed(settled("mesh.dp=2", "mesh.cp=1"))
    assert cut.peak.kinds["activations"] < 0.6 * whole.peak.kinds["activations"]
    for kind in ("param", "master", "moments"):
        assert cut.peak.kinds[kind] == whole.peak.kinds[kind]


def test_auto_keeps_the_step_and_cuts_its_sequences() -> None:
    run = settled("mesh.dp=2", "zero=auto", "train.accumulate=null", "train.global_sequences=8")
    choice = choose(run, ["zero=auto"])
    assert choice.config.mesh == run.mesh
    assert choice.config.train.sequences(run.mesh.readers(4)) == 8
    assert choice.ranking.best[0].forecast.moved.axes["cp"] > 0
