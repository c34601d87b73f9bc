"""A run that goes on from a checkpoint has the bits of one that was never stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
from pool import Pool
from training import Told, settled, train, write_text

STEPS, STOP = 6, 3
RUNS = {
    "the default": "",
    "stage 3, parameters and states on the host": "zero.stage=3 offload=host_all",
    "everything on disk": "zero.stage=3 offload=infinity offload.disk.paths=[{folder}] offload.disk.block_bytes=8192",
    "accumulation, over the end of an epoch": "zero.stage=2 train.accumulate=3",
    "fp16, whose loss scale moves": "precision=fp16 scaler.init=1e8 scaler.growth_interval=2 zero.stage=1",
    "remainders, hybrid": "precision=bf16_remainder zero.stage=3 mesh.replicate=2",
    "bf16 moments, rounded at random": "precision.moments=bf16 zero.stage=3",
    "8-bit moments": "precision.moments=int8 zero.stage=3",
    "delayed, one step stale": "zero.stage=2 offload=host offload.overlap=delayed offload.delay_warmup_steps=1",
    "ahead of the decision": "zero.stage=3 offload=host offload.overlap=backward",
    "another rule": "optim.rule=SGD optim.options={momentum:0.9} zero.stage=2",
    "another rule for matrices": "optim.rule=muon optim.muon.lr=1e-3 zero.stage=3",
    "tiles": "block.tiles=3 zero.stage=3 block.loss_tiles=2",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So short that the run goes through it more than once."""
    return write_text(tmp_path_factory.mktemp("data") / "words.txt", words=300)


def run(pool: Pool, folder: Path, data: Path, *settings: str, ranks: int = 2) -> list[Told]:
    told: list[Told] = pool.run(train, ranks, settled(data, *settings), folder, timeout_s=300)
    return told


def same_files(one: Path, other: Path) -> bool:
    files = sorted(path.name for path in one.glob("rank_*.safetensors"))
    assert files
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


@pytest.mark.parametrize("settings", RUNS.values(), ids=RUNS.keys())
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    pool: Pool, tmp_path: Path, text: Path, settings: str
) -> None:
    ranks = 4 if "replicate" in settings else 2
    common = [
        *settings.replace("{folder}", str(tmp_path)).split(),
        "data.held_out=0.25",
        f"train.steps={STEPS}",
        f"launch.workers={ranks}",
    ]
    saves = [f"checkpoint.every={STOP}", "checkpoint.keep=9"]
    whole = run(pool, tmp_path, text, *common, *saves, f"checkpoint.folder={tmp_path}/whole", ranks=ranks)
    untouched = run(pool, tmp_path, text, *common, ranks=ranks)
    assert untouched == whole  # saving changes nothing
    again = [f"resume={tmp_path}/whole/step_{STOP:08d}", f"checkpoint.folder={tmp_path}/again"]
    rest = run(pool, tmp_path, text, *common, *saves, *again, ranks=ranks)
    assert [each.losses for each in rest] == [each.losses[STOP:] for each in whole]
    assert same_files(tmp_path / f"whole/step_{STEPS:08d}", tmp_path / f"again/step_{STEPS:08d}")
