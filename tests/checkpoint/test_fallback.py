"""resume=auto goes on from the newest checkpoint that is whole, says so, and has the bits of resuming from that one."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool, WorkerError
from small_runs import settled, train, write_text
from torch import nn
from train_runs import SMALLEST
from training_loops import snapshot, unequal
from typed_commands import refused, typed
from written_checkpoints import LATEST, MANIFEST, body_of, data_name, flip, index_name, names, reseal, write_sealed

import dzero
from dzero import CheckpointConfig, Checkpointer, CheckpointError

NEWEST, BEFORE = "step_00000004", "step_00000003"
HOST = {"grad": "host", "master": "host", "moments": "host"}
OVER_ALL = ["replicate", "shard"]
KINDS: dict[str, tuple[int, dict[str, Any]]] = {
    "stage 3": (3, {}),
    "states on disk": (3, {"offload": dict.fromkeys([*HOST, "param"], "disk")}),
    "one step stale": (2, {"offload": HOST | {"overlap": "delayed", "delay_warmup_steps": 1}}),
    "shared states": (2, {"optimizer_shard_axes": OVER_ALL}),
    "fp16": (1, {"precision": "fp16"}),
}


class Loop:
    """A loop of one's own; of this width, files have several blocks of 512 KiB, the largest with this staging."""

    def __init__(self, kind: str, folder: Path, width: int = 512) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(384, width), nn.Tanh(), nn.Linear(width, 384))
        stage, more = KINDS[kind]
        offload, axes = dict(more.get("offload", {})), more.get("optimizer_shard_axes", ["shard"])
        if "disk" in offload.values():
            offload["disk"] = dzero.DiskConfig(paths=[str(folder.parent)], block_bytes=8192)
        self.sharded = dzero.shard(
            model,
            dzero.ZeroConfig(stage=stage, optimizer_shard_axes=axes),
            precision=more.get("precision", "bf16"),
            offload=dzero.OffloadConfig(**offload),
            mesh=dzero.make_mesh("cpu", replicate=len(axes)),
        )
        self.optim = dzero.AdamW(self.sharded, lr=1e-2, scaler=dzero.ScalerConfig(init=2.0**20, growth_interval=2))
        config = CheckpointConfig(folder=str(folder), keep=9, staging_bytes=1 << 20)
        self.checkpoints = Checkpointer(config, self.sharded, self.optim)

    def steps(self, first: int, last: int, *, saves: bool = False) -> None:
        for step in range(first, last):
            generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
            loss = self.sharded.model(torch.randn(4, 384, generator=generator)).float().square().mean()
            self.optim.scale_loss(loss).backward()
            self.optim.step()
            if saves:
                self.checkpoints.save(step + 1, {})
        self.checkpoints.finish()


def last_state(folder: Path, rank: int) -> int:
    """A bit of the last moment in a rank's file."""
    index = body_of(folder / index_name(rank))
    ends = [part["end"] for name, part in index["parts"].items() if name.startswith("exp_avg")]
    assert max(ends) > 2 * index["block_bytes"]
    return int(8 * (index["data_start"] + max(ends) - 1))


def on_rank_0(do: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


def both_ways(rank: int, ranks: int, kind: str, folder: Path) -> tuple[list[str], list[str]]:
    """What differs between passing over the newest and resuming from the one before; what the former is told."""
    loop = Loop(kind, folder)
    loop.steps(0, 4, saves=True)
    loop.checkpoints.close()
    on_rank_0(lambda: flip(folder / NEWEST / data_name(1), last_state(folder / NEWEST, 1)))
    ends, notes = [], []
    for which in (str(folder / BEFORE), "auto"):
        loop = Loop(kind, folder)
        resumed = loop.checkpoints.resume(which)
        assert resumed is not None
        assert resumed.step == 3
        notes = resumed.notes
        loop.steps(3, 5)
        loop.optim.synchronize()
        ends.append(snapshot(loop.sharded, loop.optim))
        loop.checkpoints.close()
    return unequal(*ends), notes


@pytest.mark.product(keep=2)
@pytest.mark.parametrize("kind", KINDS)
def test_damage_that_only_one_rank_meets_late_leaves_the_bits_of_resuming_from_the_one_before(
    pool: Pool, tmp_path: Path, kind: str
) -> None:
    """The last block of rank 1's states: by then it has taken the others, and rank 0 all of its own."""
    ranks = 4 if kind == "shared states" else 2
    told = pool.run(both_ways, ranks, kind, tmp_path / "checkpoints")
    assert [differs for differs, _ in told] == [[]] * ranks
    assert re.search(rf"PASSED OVER .*{NEWEST}: rank 1: .* is not what was written", told[0][1][0])
    assert [notes for _, notes in told[1:]] == [[]] * (ranks - 1)  # rank 0's is the log


Change = Callable[[Path], object]
TAKEN = "the checkpoint that was saved last is taken"
IN_RUN = 8 * 37  # the lowest bit of a hexadecimal digit, which gives no quote: the file stays valid JSON
DAMAGE: dict[str, tuple[Change, int, str]] = {
    "nothing": (lambda f: None, 4, ""),
    "a flipped bit of the manifest": (lambda f: flip(f / NEWEST / MANIFEST, IN_RUN), 3, "its checksum is"),
    "the newest is gone": (lambda f: shutil.rmtree(f / NEWEST), 3, "it is missing"),
    "data cut short": (lambda f: os.truncate(f / NEWEST / data_name(1), 100), 3, "it was cut short"),
    "a flipped bit of the pointer": (lambda f: flip(f / LATEST, 100), 4, TAKEN),
    "a pointer cut to nothing": (lambda f: os.truncate(f / LATEST, 0), 4, TAKEN),
    "a pointer that names no checkpoint": (lambda f: write_sealed(f / LATEST, {"name": f"../{BEFORE}"}), 4, TAKEN),
    "a missing pointer": (lambda f: (f / LATEST).unlink(), 4, ""),
    "the pointer and the newest manifest": (
        lambda f: [flip(f / LATEST, 100), flip(f / NEWEST / MANIFEST, IN_RUN)],
        3,
        f"passed over: .*{NEWEST}/{MANIFEST}",
    ),
}


def resumed_from(rank: int, ranks: int, folders: list[Path], strict: bool) -> list[tuple[int, list[str]]]:
    """The step that each of `folders` gives, and what is told; step -1 and the error where none is given."""
    found = []
    for folder in folders:
        loop = Loop("stage 3", folder, width=8)
        try:
            resumed = loop.checkpoints.resume("auto", strict=strict)
            assert resumed is not None
            found.append((resumed.step, resumed.notes))
        except CheckpointError as error:
            found.append((-1, [str(error)]))
        loop.checkpoints.close()
    return found


def saved(rank: int, ranks: int, folder: Path) -> None:
    loop = Loop("stage 3", folder, width=8)
    loop.steps(0, 4, saves=True)
    loop.checkpoints.close()


@pytest.fixture(scope="module")
def made(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 4 of a loop on two ranks."""
    folder = tmp_path_factory.mktemp("made") / "checkpoints"
    pool.run(saved, 2, folder)
    return folder


def test_whatever_is_damaged_is_named_and_the_run_goes_on_but_not_with_strict(
    pool: Pool, made: Path, tmp_path: Path
) -> None:
    folders = [Path(shutil.copytree(made, tmp_path / str(number))) for number in range(len(DAMAGE))]
    for folder, (damage, _, _) in zip(folders, DAMAGE.values(), strict=True):
        damage(folder)
    of_ranks = pool.run(resumed_from, 2, folders, False)
    for kind, (_, want, said), first, second in zip(DAMAGE, DAMAGE.values(), *of_ranks, strict=True):
        step, notes = first
        assert (step, second) == (want, (want, [])), kind
        assert re.search(said, "\n".join(notes)), kind
        assert len([note for note in notes if "assed over" in note.lower()]) == (1 if want < 4 else 0), kind
    for of_rank in pool.run(resumed_from, 2, folders, True):
        for kind, (step, notes), (_, want, said) in zip(DAMAGE, of_rank, DAMAGE.values(), strict=True):
            assert step == (-1 if said else want), kind
            assert ("resume.strict=true stops here" in "".join(notes)) == bool(said), kind


def test_a_folder_where_nothing_opens_does_not_start_anew(pool: Pool, made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "checkpoints"))
    for name in names(folder):
        flip(folder / name / MANIFEST, IN_RUN)
    for pointer, text in ((True, "no checkpoint of this run is whole"), (False, "no checkpoint opens")):
        if not pointer:
            flip(folder / LATEST, 100)
        for of_rank in pool.run(resumed_from, 2, [folder], False):
            step, (told,) = of_rank[0]
            assert step == -1
            assert told.startswith(f"{folder}: {text}; move"), told


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "words.txt")


SMALL = [*SMALLEST, "launch.workers=1", "launch.threads=1", "zero.stage=3", "checkpoint.every=1", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def trained(pool: Pool, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of steps 1 to 4 of a run of one rank."""
    folder = tmp_path_factory.mktemp("trained") / "checkpoints"
    pool.run(train, 1, settled(text, *SMALL, "train.steps=4", f"checkpoint.folder={folder}"), folder.parent)
    return folder


def test_train_py_goes_on_from_the_newest_that_is_whole_and_says_so_but_not_with_strict(
    trained: Path, text: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "checkpoints"))
    flip(folder / NEWEST / data_name(0), -1)
    (folder / BEFORE / index_name(0)).unlink()
    words = ["train.py", *SMALL, f"data.path={text}", "train.steps=4", "resume=auto"]
    told = refused(typed(*words, "resume.strict=true", cwd=tmp_path), "resume.strict=true stops here")
    assert re.match(rf"error: rank \d: checkpoints/{NEWEST}/.* is not what was written", told)
    ended = typed(*words, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    for out in (ended.stderr, ended.stdout):
        assert re.search(rf"PASSED OVER checkpoints/{NEWEST}: rank \d: .*{data_name(0)}: block \d+, .*not what", out)
        assert re.search(rf"PASSED OVER checkpoints/{BEFORE}: rank \d: .*{index_name(0)}: No such file", out)
        assert f"going on from checkpoints/step_00000002 instead: 2 steps before {NEWEST} are made again" in out
    assert "resumed from checkpoints/step_00000002, after step 2" in ended.stdout
    assert body_of(folder / LATEST)["name"] == f"{NEWEST}_2"
    assert {NEWEST, BEFORE} < {*names(folder)}


def test_another_model_and_a_newer_format_are_no_damage_and_stop_the_run(
    pool: Pool, trained: Path, text: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "checkpoints"))
    words = [*SMALL, "train.steps=6", "resume=auto", f"checkpoint.folder={folder}"]
    with pytest.raises(WorkerError, match=rf"{NEWEST}.*another model"):
        pool.run(train, 1, settled(text, *words, "model.hidden_size=64"), tmp_path)
    reseal(folder / NEWEST / MANIFEST, lambda body: body.update(version=99))
    with pytest.raises(WorkerError, match="install a newer one"):
        pool.run(train, 1, settled(text, *words), tmp_path)


MISSING = object()
GROUP = ("optim", "groups", 0)
WRONG: list[tuple[tuple[str | int, ...], Any, str, str]] = [
    (("optim",), [], "state.optim", "Expected `object`, got `array`"),
    ((*GROUP, "params"), 3, "state.optim.groups[0].params", "Expected `array`"),
    (("optim", "skipped_steps"), "1", "state.optim.skipped_steps", "Expected `int`, got `str`"),
    (("optim", "skipped_steps"), -1, "state.optim.skipped_steps", "Expected `int` >= 0"),
    (("optim", "scaler"), {"scale": 1}, "state.optim.scaler", "no scale of a loss"),
    ((*GROUP, "betas"), [5, 5], "state.optim.groups[0]: betas=[5, 5]", "pass two numbers in [0, 1)"),
    ((*GROUP, "lr"), -1.0, "state.optim.groups[0]: lr=-1.0", "pass a number that is not negative"),
    ((*GROUP, "lr"), 1e308, "state.optim.groups[0]: lr=1e+308", "pass a number up to 1e+06"),
    ((*GROUP, "eps"), "x", "state.optim.groups[0]: eps='x'", "pass a number up to 1e+06"),
    (("optim", "states", "norm.weight", "step"), -5, "state.optim.states", "has step=-5, no count of updates"),
    (("extra",), MISSING, "state", "missing required field `extra`"),
    (("extra",), 7, "state.extra", "Expected `object`, got `int`"),
    (("extra", "stream"), "s", "state.extra.stream", "Expected `object`, got `str`"),
    (("extra", "stream", "epoch"), 0.5, "state.extra.stream[...]", "Expected `int`"),
    (("extra", "config"), 1, "state.extra.config", "Expected `object`, got `int`"),
    (("extra", "config", "mesh"), [], "state.extra.config.mesh", "got `array`"),
    (("extra", "held_out"), [1.0], "state.extra.held_out", "Expected `object`, got `array`"),
    (("extra", "held_out"), {"loss": "low", "step": 1, "worse": 0}, "state.extra.held_out.loss", "got `str`"),
    (("extra", "held_out"), {"loss": None, "step": 1, "worse": 2**60}, "state.extra.held_out.worse", "`int` <="),
    (("extra", "step_sequences"), [2], "state.extra.step_sequences", "Expected `int`"),
]
"""Where something is put into the state of a manifest, what, and the field and the reason that are told."""


def put(state: Any, way: tuple[str | int, ...], value: Any) -> None:
    for key in way[:-1]:
        state = state[key]
    state[way[-1]] = value
    if value is MISSING:
        del state[way[-1]]


def told_of_all(rank: int, ranks: int, runs: list[Any], folder: Path) -> list[str]:
    """What each of `runs` is told: the kind of the error, and its text."""
    found = []
    for run in runs:
        try:
            train(rank, ranks, run, folder)
            found.append("nothing is wrong")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_a_sealed_manifest_with_wrong_types_is_refused_in_one_line_that_names_the_field(
    pool: Pool, trained: Path, text: Path, tmp_path: Path
) -> None:
    cases, runs = [tmp_path / str(number) / NEWEST for number in range(len(WRONG))], []
    for case, (way, value, _, _) in zip(cases, WRONG, strict=True):
        shutil.copytree(trained / NEWEST, case)
        reseal(case / MANIFEST, lambda body, way=way, value=value: put(body["state"], way, value))  # type: ignore[misc]
        saves = ["train.steps=6", f"resume={case}", f"checkpoint.folder={case.parent}"]
        runs.append(settled(text, *SMALL, *saves))
    (told,) = pool.run(told_of_all, 1, runs, tmp_path)
    for line, case, (_, _, field, what) in zip(told, cases, WRONG, strict=True):
        assert line.startswith(f"CheckpointError: {case / MANIFEST}: {field}"), line
        assert what in line, line
        assert "\n" not in line
