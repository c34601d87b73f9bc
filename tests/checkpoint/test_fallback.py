"""resume=auto goes on from the newest checkpoint that is whole, says so, and has the bits of resuming from that one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool, WorkerError
from small_runs import ROOT, Told, settled, train, write_text
from train_runs import SMALLEST

from dzero.checkpoint import saver
from dzero.checkpoint.config import ResumeConfig
from dzero.checkpoint.format import MANIFEST, data_name, index_name, seal
from dzero.checkpoint.store import LATEST, CheckpointStore
from dzero.config import RunConfig
from dzero.trainer.trainer import Trainer

SECONDS, BLOCK = 400.0, 4096
SMALL = [*SMALLEST, "launch.workers=2", "launch.threads=1", "checkpoint.every=1", "checkpoint.keep=9"]
NEWEST, BEFORE = "step_00000004", "step_00000003"
HELD_BACK = "zero.stage=2 offload=host offload.overlap=delayed offload.delay_warmup_steps=1"
KINDS = {
    "stage 3": "zero.stage=3",
    "states on disk": "zero.stage=3 offload=infinity offload.disk.paths=[{folder}] offload.disk.block_bytes=8192",
    "shared states": "zero.stage=2 mesh.replicate=2 zero.optimizer_shard_axes=[replicate,shard]",
    "one step stale": HELD_BACK,
    "fp16": "zero.stage=1 precision=fp16 scaler.init=1e8 scaler.growth_interval=2",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


def in_small_blocks(rank: int, ranks: int, run: RunConfig, folder: Path) -> Told:
    """A whole run, whose files have many blocks."""
    before, saver.BLOCK_BYTES = saver.BLOCK_BYTES, BLOCK
    try:
        return train(rank, ranks, run, folder)
    finally:
        saver.BLOCK_BYTES = before


def ran(pool: Pool, text: Path, folder: Path, *words: str) -> list[Told]:
    ranks = 4 if "mesh.replicate=2" in words else 2
    run = settled(text, *SMALL, *words, f"launch.workers={ranks}", f"checkpoint.folder={folder}")
    told: list[Told] = pool.run(in_small_blocks, ranks, run, folder.parent, timeout_s=SECONDS)
    return told


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def tensors(folder: Path) -> list[bytes]:
    files = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    assert len(files) >= 2
    return files


def last_state(folder: Path, rank: int) -> int:
    """A byte of the last moment in a rank's file."""
    index = json.loads((folder / index_name(rank)).read_bytes())["body"]
    parts = [part for name, part in index["parts"].items() if name.startswith("exp_avg")]
    return int(index["data_start"] + max(part["end"] for part in parts) - 1)


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("line", KINDS.values(), ids=KINDS.keys())
def test_damage_that_only_one_rank_meets_late_leaves_the_bits_of_resuming_from_the_one_before(
    pool: Pool, text: Path, tmp_path: Path, line: str
) -> None:
    """The last block of rank 1's states: by then it has taken the others, and rank 0 all of its own."""
    words = line.replace("{folder}", str(tmp_path)).split()
    made = tmp_path / "made"
    ran(pool, text, made, *words, "train.steps=4")
    damaged, direct = tmp_path / "damaged", tmp_path / "direct"
    for folder in (damaged, direct):
        shutil.copytree(made, folder)
    flip(damaged / NEWEST / data_name(1), last_state(damaged / NEWEST, 1))
    want = ran(pool, text, direct, *words, "train.steps=6", f"resume={direct / BEFORE}")
    found = ran(pool, text, damaged, *words, "train.steps=6", "resume=auto")
    assert [told.losses for told in found] == [told.losses for told in want]
    assert len(found[0].losses) == 3
    last = "step_00000006"
    assert tensors(damaged / last) == tensors(direct / last)
    assert (damaged / NEWEST).is_dir()


@pytest.fixture(scope="module")
def made(pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 4."""
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    ran(pool, text, folder, "zero.stage=3", "train.steps=4")
    return folder


def command(folder: Path, text: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "HYDRA_FULL_ERROR")}
    line = [sys.executable, str(ROOT / "train.py"), *SMALL, "zero.stage=3", f"data.path={text}", *words]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, timeout=SECONDS)


def test_train_py_goes_on_from_the_newest_that_is_whole_and_says_so_but_not_with_strict(
    made: Path, text: Path, tmp_path: Path
) -> None:
    shelf = CheckpointStore(shutil.copytree(made, tmp_path / "checkpoints"))
    flip(shelf.path / NEWEST / data_name(1), last_state(shelf.path / NEWEST, 1))
    (shelf.path / BEFORE / index_name(0)).unlink()
    stopped = command(tmp_path, text, "train.steps=4", "resume=auto", "resume.strict=true")
    assert stopped.returncode == 1
    assert stopped.stderr.count("\n") == 1
    assert re.match(
        rf"error: rank \d: checkpoints/{NEWEST}/.* is not what was written.*resume.strict=true", stopped.stderr
    )
    ended = command(tmp_path, text, "train.steps=4", "resume=auto")
    assert ended.returncode == 0, ended.stderr
    for told in (ended.stderr, ended.stdout):
        assert re.search(
            rf"PASSED OVER checkpoints/{NEWEST}: rank \d: .*{data_name(1)}: block \d+, .*not what was", told
        )
        assert re.search(rf"PASSED OVER checkpoints/{BEFORE}: rank \d: .*{index_name(0)}: No such file", told)
        assert f"going on from checkpoints/step_00000002 instead: 2 steps before {NEWEST} are made again" in told
    assert "resumed from checkpoints/step_00000002, after step 2" in ended.stdout
    assert shelf.latest() == f"{NEWEST}_2"
    assert {NEWEST, BEFORE} < {*shelf.names()}


def resumed(rank: int, ranks: int, run: RunConfig, folder: Path) -> tuple[int, list[str]]:
    """The step that a run goes on from, and what it is told."""
    trainer = Trainer(run, folder, torch.device("cpu"))
    with trainer.saves:
        return trainer.done_steps, trainer.saves.notes


def cut_by_a_byte(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def replaced(path: Path) -> None:
    """Put a folder where a file was."""
    path.unlink()
    path.mkdir()


Change = Callable[[Path], object]
DAMAGE: dict[str, tuple[Change, int, str]] = {
    "nothing": (lambda f: None, 4, ""),
    "a flipped bit of the manifest": (lambda f: flip(f / NEWEST / MANIFEST, 40), 3, "its checksum is"),
    "the newest is gone": (lambda f: shutil.rmtree(f / NEWEST), 3, "it is missing"),
    "data cut short": (lambda f: os.truncate(f / NEWEST / data_name(1), 100), 3, "it was cut short"),
    "a manifest that lacks its last byte": (lambda f: cut_by_a_byte(f / NEWEST / MANIFEST), 3, "it is not what dzero"),
    "an index of many megabytes": (lambda f: os.truncate(f / NEWEST / index_name(0), 1 << 27), 3, "more than the"),
    "a folder in place of data": (lambda f: replaced(f / NEWEST / data_name(0)), 3, "it is no regular file"),
    "a flipped bit of the pointer": (lambda f: flip(f / LATEST, 12), 4, "the checkpoint that was saved last is taken"),
    "the pointer and the newest manifest": (
        lambda f: (flip(f / LATEST, 12), flip(f / NEWEST / MANIFEST, 40)),
        3,
        f"passed over: .*{NEWEST}/{MANIFEST}",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_whatever_is_damaged_is_named_and_the_run_goes_on(
    pool: Pool, made: Path, text: Path, tmp_path: Path, kind: str
) -> None:
    damage, step, said = DAMAGE[kind]
    folder = Path(shutil.copytree(made, tmp_path / "checkpoints"))
    damage(folder)
    run = settled(text, *SMALL, "zero.stage=3", "train.steps=6", "resume=auto", f"checkpoint.folder={folder}")
    first, second = pool.run(resumed, 2, run, tmp_path, timeout_s=SECONDS)
    assert (first[0], second[0]) == (step, step)
    assert re.search(said, "\n".join(first[1]))
    assert len([note for note in first[1] if "assed over" in note.lower()]) == (1 if step < 4 else 0)


def test_strict_stops_where_the_pointer_is_damaged_too(pool: Pool, made: Path, text: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "checkpoints"))
    DAMAGE["the pointer and the newest manifest"][0](folder)
    strict = ["resume=auto", "resume.strict=true", f"checkpoint.folder={folder}"]
    run = settled(text, *SMALL, "zero.stage=3", "train.steps=6", *strict)
    with pytest.raises(WorkerError, match=r"resume\.strict=true stops here"):
        pool.run(resumed, 2, run, tmp_path, timeout_s=SECONDS)


def test_another_model_and_a_newer_format_are_no_damage_and_stop_the_run(
    pool: Pool, made: Path, text: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "checkpoints"))
    words = [*SMALL, "zero.stage=3", "train.steps=6", "resume=auto", f"checkpoint.folder={folder}"]
    with pytest.raises(WorkerError, match=rf"{NEWEST}.*another model"):
        pool.run(resumed, 2, settled(text, *words, "model.hidden_size=64"), tmp_path, timeout_s=SECONDS)
    resealed(folder, lambda body: body.update(version=99))
    with pytest.raises(WorkerError, match="install a newer one"):
        pool.run(resumed, 2, settled(text, *words), tmp_path, timeout_s=SECONDS)


def resealed(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = folder / NEWEST / MANIFEST
    body = json.loads(manifest.read_bytes())["body"]
    change(body)
    manifest.write_bytes(seal(body)[0])


def in_group(**settings: Any) -> Callable[[dict[str, Any]], object]:
    """Return what gives the first group other settings."""
    return lambda state: state["optim"]["groups"][0].update(settings)


def steps(state: dict[str, Any]) -> None:
    """Give every parameter a number of updates that none has made."""
    for of_param in state["optim"]["states"].values():
        of_param["step"] = -5


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "state.optim": (lambda state: state.update(optim=[]), "Expected `object`, got `array`"),
    "state.optim.groups[0].params": (lambda state: state["optim"]["groups"][0].update(params=3), "Expected `array`"),
    "state.optim.skipped_steps": (lambda state: state["optim"].update(skipped_steps="1"), "Expected `int`, got `str`"),
    "state.optim.scaler": (lambda state: state["optim"].update(scaler={"scale": 1}), "no scale of a loss"),
    "state.optim.groups[0]: betas=[5, 5]": (in_group(betas=[5, 5]), "pass two numbers in [0, 1)"),
    "state.optim.groups[0]: lr=-1.0": (in_group(lr=-1.0), "pass a number that is not negative"),
    "state.optim.groups[0]: lr=1e+308": (in_group(lr=1e308), "pass a number up to 1e+06"),
    "state.optim.groups[0]: weight_decay=1e+300": (in_group(weight_decay=1e300), "pass a number up to 1e+06"),
    "state.optim.groups[0]: eps='x'": (in_group(eps="x"), "pass a number up to 1e+06"),
    "state.optim.states": (steps, "has step=-5, no count of updates"),
    "state": (lambda state: state.pop("extra"), "missing required field `extra`"),
    "state.extra": (lambda state: state.update(extra=7), "Expected `object`, got `int`"),
    "state.extra.stream": (lambda state: state["extra"].update(stream="s"), "Expected `object`, got `str`"),
    "state.extra.stream[...]": (lambda state: state["extra"]["stream"].update(epoch=0.5), "Expected `int`"),
    "state.extra.config": (lambda state: state["extra"].update(config=1), "Expected `object`, got `int`"),
    "state.extra.config.mesh": (lambda state: state["extra"]["config"].update(mesh=[]), "got `array`"),
    "state.extra.held_out": (lambda state: state["extra"].update(held_out=[1.0]), "Expected `object`, got `array`"),
    "state.extra.held_out.loss": (
        lambda state: state["extra"].update(held_out={"loss": "low", "step": 1, "worse": 0}),
        "got `str`",
    ),
    "state.extra.step_sequences": (lambda state: state["extra"].update(step_sequences=[2]), "Expected `int`"),
}


def told_of_all(rank: int, ranks: int, run: RunConfig, folder: Path, cases: list[Path]) -> list[str]:
    """What a run is told of each of `cases`: the kind of the error, and its text."""
    found = []
    for case in cases:
        try:
            resumed(rank, ranks, _from(run, case), folder)
            found.append("nothing is wrong")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def _from(run: RunConfig, source: Path) -> RunConfig:
    checkpoint = replace(run.checkpoint, every=None, keep=2)
    return replace(run, checkpoint=checkpoint, resume=ResumeConfig(source=str(source / NEWEST)))


def test_a_sealed_manifest_with_wrong_types_is_refused_in_one_line_that_names_the_field(
    pool: Pool, made: Path, text: Path, tmp_path: Path
) -> None:
    cases = [Path(shutil.copytree(made, tmp_path / str(number))) for number in range(len(WRONG))]
    for case, (change, _) in zip(cases, WRONG.values(), strict=True):
        resealed(case, lambda body, change=change: change(body["state"]))  # type: ignore[misc]
    run = settled(text, *SMALL, "zero.stage=3", "train.steps=6")
    for told in pool.run(told_of_all, 2, run, tmp_path, cases, timeout_s=SECONDS):
        for line, case, (field, (_, what)) in zip(told, cases, WRONG.items(), strict=True):
            assert line.startswith(f"CheckpointError: {case / NEWEST / MANIFEST}: {field}"), line
            assert what in line, line
            assert "\n" not in line


def test_strict_without_anything_to_resume_from_is_refused() -> None:
    with pytest.raises(ValueError, match=r"resume\.strict=true has no effect with resume\.source=null"):
        ResumeConfig(strict=True)
