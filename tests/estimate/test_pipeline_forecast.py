"""A plan of a pipeline: what its fullest part holds is what simulating each part finds, and what it moves is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulator.scenario import Scenario
from simulator.simulate import simulate
from small_runs import settled

from dzero import PrecisionConfig, RunError, ZeroConfig
from dzero.estimate.measure_hardware import unmeasured
from dzero.mesh_config import MeshConfig
from dzero.models.config import ModelConfig
from dzero.parallel.config import BlockConfig
from dzero.plan.plan_run import forecast_run

MODEL = {"hidden_size": 64, "layers": 4, "heads": 4, "kv_heads": 2, "ffn_size": 128, "tied": True}


CASES = [(2, "1f1b", "none", 4), (1, "1f1b", "full", 3), (3, "gpipe", "full", 3)]


@pytest.mark.product(keep=1)
@pytest.mark.parametrize(("stage", "schedule", "recompute", "microbatches"), CASES)
def test_the_fullest_part_is_planned_and_its_moves_are_exact(
    tmp_path: Path, stage: int, schedule: str, recompute: str, microbatches: int
) -> None:
    mesh = MeshConfig(dp=2, pp=2, pp_schedule=schedule)
    scenario = Scenario(
        model=ModelConfig(vocab_size=256, **MODEL),
        ranks=4,
        sequences=2,
        tokens=64,
        accumulate=microbatches,
        zero=ZeroConfig(stage=stage),
        precision=PrecisionConfig(param="bf16"),
        mesh=mesh,
        block=BlockConfig(activation_checkpoint=recompute),
        device_type="cpu",
    )
    parts = [simulate(scenario, part=part) for part in range(2)]
    sizes = [f"model.{key}={value}" for key, value in MODEL.items()]
    settings = [f"mesh.pp_schedule={schedule}", f"zero.stage={stage}", f"block.activation_checkpoint={recompute}"]
    settings += ["mesh.pp=2", "mesh.dp=2", f"train.accumulate={microbatches}", "train.sequence_tokens=64"]
    config = settled(tmp_path, *sizes, *settings, "model.vocab_size=256", "train.microbatch_sequences=2")
    found = forecast_run(config, unmeasured(4, "cpu"))
    fullest = max(parts, key=lambda part: part.peak.total)
    assert found.peak_bytes == pytest.approx(fullest.peak.total, rel=0.1)
    for axis in ("shard", "pp"):
        moved = [entry for entry in fullest.traffic if entry.axis == axis and entry.phase != "control"]
        assert found.moved.axes[axis] == sum(fullest.traffic[entry].sent_bytes for entry in moved)
        assert found.moved.calls[axis] == sum(fullest.traffic[entry].calls for entry in moved)


def test_what_several_parts_of_a_rank_hold_is_not_foreseen(tmp_path: Path) -> None:
    config = settled(tmp_path, "mesh.pp=2", "mesh.pp_schedule=interleaved", "train.accumulate=2", "model.layers=4")
    with pytest.raises(RunError, match=r"what mesh.pp_schedule=interleaved holds at once is not foreseen; .*1f1b"):
        forecast_run(config, unmeasured(2, "cpu"))
