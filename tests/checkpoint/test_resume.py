"""A run that goes on from a checkpoint has the bits of one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pool import Pool, WorkerError
from small_runs import Told, settled, train, write_text

STEPS, STOP = 4, 2
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
    "matrices on disk": "optim.rule=muon zero.stage=3 offload=infinity offload.disk.paths=[{folder}]",
    "a rule with owners": "optim.rule=Adafactor optim.lr=1e-2 zero.stage=3",
    "another rule, on disk": "optim.rule=Adam optim.options={amsgrad:true} zero.stage=3 offload=infinity "
    "offload.disk.paths=[{folder}]",
    "another rule, on disk and late": "optim.rule=NAdam zero.stage=2 precision=bf16 offload=disk "
    "offload.disk.paths=[{folder}] offload.overlap=delayed offload.delay_warmup_steps=1",
    "a rule with owners, on the host": "optim.rule=Adafactor optim.lr=1e-2 zero.stage=2 offload=host",
    "tiles": "block.tiles=3 zero.stage=3 block.loss_tiles=2 block.embedding_tiles=2 model.tied=false",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So short that the run goes through it more than once."""
    return write_text(tmp_path_factory.mktemp("data") / "words.txt", words=300)


def run(pool: Pool, folder: Path, data: Path, *settings: str) -> list[Told]:
    made = settled(data, *settings)
    told: list[Told] = pool.run(train, made.launch.workers or 1, made, folder, timeout_s=300)
    return told


def same_files(one: Path, other: Path) -> bool:
    files = sorted(path.name for path in one.glob("rank_*.safetensors"))
    assert files
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def settings_of(line: str, folder: Path) -> list[str]:
    ranks = 4 if "replicate" in line else 2
    words = line.replace("{folder}", str(folder)).split()
    return [*words, "data.held_out=0.25", f"train.steps={STEPS}", f"launch.workers={ranks}"]


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("line", RUNS.values(), ids=RUNS.keys())
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(pool: Pool, tmp_path: Path, text: Path, line: str) -> None:
    common = settings_of(line, tmp_path)
    saves = [f"checkpoint.every={STOP}", "checkpoint.keep=9"]
    whole = run(pool, tmp_path, text, *common, *saves, f"checkpoint.folder={tmp_path}/whole")
    again = [f"resume={tmp_path}/whole/step_{STOP:08d}", f"checkpoint.folder={tmp_path}/again"]
    rest = run(pool, tmp_path, text, *common, *saves, *again)
    assert [each.losses for each in rest] == [each.losses[STOP:] for each in whole]
    assert same_files(tmp_path / f"whole/step_{STEPS:08d}", tmp_path / f"again/step_{STEPS:08d}")


SAVED = "tests/checkpoint/test_resume.py::test_saving_changes_nothing"


def marked(name: str, line: str) -> Any:
    """Full, where a step may be unfinished when a save begins."""
    is_under_way = "overlap" in line or "infinity" in line
    mark = pytest.mark.full(SAVED) if is_under_way else pytest.mark.slow
    return pytest.param(line, id=name, marks=[] if name == "delayed, one step stale" else mark)


@pytest.mark.parametrize("line", [marked(name, line) for name, line in RUNS.items()])
def test_saving_changes_nothing(pool: Pool, tmp_path: Path, text: Path, line: str) -> None:
    common = settings_of(line, tmp_path)
    saved = run(pool, tmp_path, text, *common, "checkpoint.every=1", f"checkpoint.folder={tmp_path}/saved")
    assert run(pool, tmp_path, text, *common) == saved


def test_a_setting_of_the_update_rule_is_changed_by_name_or_refused(pool: Pool, tmp_path: Path, text: Path) -> None:
    common = ["zero.stage=2", "data.held_out=0", "launch.workers=2", "schedule.kind=constant"]
    saves = ["checkpoint.every=2", f"checkpoint.folder={tmp_path}/saved", "checkpoint.keep=9"]
    run(pool, tmp_path, text, *common, *saves, "train.steps=2", "optim.lr=1e-3")
    again = [*common, f"resume={tmp_path}/saved/step_00000002", "train.steps=4", "optim.lr=2e-3"]
    with pytest.raises(
        WorkerError, match=r"optim\.lr was 0\.001, is 0\.002: to change it, add resume\.override=\[optim\.lr\]"
    ):
        run(pool, tmp_path, text, *again)
    changed = run(pool, tmp_path, text, *again, "resume.override=[optim.lr]")
    kept = run(pool, tmp_path, text, *again[:-1], "optim.lr=1e-3")
    assert changed[0].losses[0] == kept[0].losses[0]
    assert changed[0].losses[1] != kept[0].losses[1]
