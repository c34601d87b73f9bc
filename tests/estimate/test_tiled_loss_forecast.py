"""Of losses in tiles whose head is on other ranks too: the peak that is predicted is what a run takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from rank_cases import trained

from dzero.config import RunConfig
from dzero.overrides import composed
from dzero.plan.preflight import needed
from dzero.plan.run_layout import workers_of

CONF = Path(__file__).parents[2] / "conf"
VOCABULARY = 8192
SMALL = [
    *("model.hidden_size=32", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.ffn_size=64"),
    *(f"model.vocab_size={VOCABULARY}", "train.microbatch_sequences=2", "train.sequence_tokens=256"),
    *("hardware=laptop", "launch.device=cpu", "zero.stage=2", "mesh.dp=1"),
]


def settled(*settings: str) -> RunConfig:
    return composed([*SMALL, *settings], CONF)


def measured(rank: int, ranks: int, run: RunConfig) -> int:
    """The device's peak in a step."""
    return trained(run, VOCABULARY)[0]


@pytest.mark.parametrize("mesh", ["mesh.tp=2", "mesh.pp=2 train.accumulate=2"])
def test_the_peak_is_predicted_and_lower_than_with_whole_logits(pool: Pool, mesh: str) -> None:
    """The fp32 logits of a microbatch are 2 x 256 x 8192 x 4 bytes, by tp."""
    runs = {n: settled(*mesh.split(), f"block.loss_tiles={n}") for n in (1, 8)}
    peaks = {n: max(pool.run(measured, workers_of(run), run, timeout_s=300)) for n, run in runs.items()}
    memory = needed(runs[8])
    predicted = memory.peak.total_bytes + memory.staging
    print(f"peaks {peaks}, predicted {predicted / peaks[8] - 1:+.1%}")
    assert -0.02 < predicted / peaks[8] - 1 < 0.07
    assert peaks[8] < 0.5 * peaks[1]
