"""Every example of conf/experiment composes, fits the nodes that it was written for, and says what it moves."""

from __future__ import annotations

from pathlib import Path

import pytest

from dzero.estimate.forecast import DEVICE
from dzero.overrides import composed
from dzero.plan.plan_run import explain_run, forecast_run

CONF = Path(__file__).parents[2] / "conf"
EXAMPLES = {  # ranks; the axes along which bytes move
    "node_of_8": (8, {"shard"}),
    "two_nodes": (16, {"shard", "replicate"}),
    "gpus_512": (512, {"shard", "tp"}),
    "trillion_4096": (4096, {"shard", "tp", "pp"}),
}


def test_all_of_them_are_here() -> None:
    assert {path.stem for path in (CONF / "experiment").glob("*.yaml")} == {"none", *EXAMPLES}


@pytest.mark.full
@pytest.mark.parametrize("name", EXAMPLES)
def test_it_fits_its_nodes(name: str) -> None:
    settings = [f"experiment={name}", "hardware=h100_80g"]
    config = composed(settings, CONF)
    assert config.hardware is not None
    found = forecast_run(config, config.hardware)
    ranks, axes = EXAMPLES[name]
    assert (found.layout.world, set(found.moved.axes)) == (ranks, axes)
    assert found.fits
    tier = found.tiers[DEVICE]
    assert tier.capacity_bytes is not None
    assert 0.2 < tier.total_bytes / tier.capacity_bytes < 0.9
    assert found.mfu is not None
    assert 0.2 < found.mfu < 0.6
    assert all(count > 0 for count in found.moved.axes.values())


def test_a_setting_of_one_is_told_with_its_file() -> None:
    settings = ["experiment=gpus_512", "train.accumulate=2"]
    tables, _ = explain_run(composed(settings, CONF), settings, CONF)
    found = {key: (value, source) for key, value, source in tables[0].rows}
    assert found["mesh.tp"] == ("8", "conf/experiment/gpus_512.yaml")
    assert found["train.accumulate"] == ("2", "the command line")
    assert found["model.layers"] == ("80", "conf/model/llama_70b.yaml")
