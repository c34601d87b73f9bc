"""A save is durable in the right order, whatever kills it; ranks wait for each other, and miss one that is gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_process import dzero as command
from pool import Pool
from torch import nn
from training_loops import params_of, sharded_net, train, unequal
from written_checkpoints import names, raw

import dzero
from dzero import AdamW, CheckpointConfig, Checkpointer, CheckpointError

HOUSE = Path(__file__).parents[2]
CASES = Path(__file__).parent / "kill_cases.py"
Told = dict[str, Any]


def killed(folder: Path, *words: object) -> Told:
    """What a run says that saves again and again, is killed and resumed each time."""
    environment = os.environ | {"PYTHONPATH": f"{HOUSE}:{HOUSE / 'tests' / 'support'}", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(CASES), str(folder), *map(str, words)], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    seen: Told = json.loads(run.stdout.splitlines()[-1])
    assert seen["wrong"] == []
    return seen


PHASES = {
    *("nothing", "half a checkpoint", "all but a name", "half of an old one"),
    *("a checkpoint that is not the latest yet", "half a pointer"),
}
"""What a kill can leave."""


def test_a_kill_before_any_call_of_a_save_leaves_the_step_before_or_the_new_one_with_its_bits(tmp_path: Path) -> None:
    """What each left is tidied up by the next run, which saves the next step and is killed one call later."""
    seen = killed(tmp_path / "shelf")
    assert seen["kills"] >= 15
    assert seen["left"].keys() == PHASES


FIRST = "test_a_kill_before_any_call_of_a_save_leaves_the_step_before_or_the_new_one_with_its_bits"
KILLS = [
    pytest.param(30, marks=pytest.mark.full(f"tests/checkpoint/test_saves.py::{FIRST}")),
    pytest.param(1000, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("kills", KILLS)
def test_random_kills_of_one_or_both_of_two_ranks_do_so_too(tmp_path: Path, kills: int) -> None:
    seen = killed(tmp_path / "shelf", kills, 0)
    assert seen["steps"] > 0
    if kills == 1000:
        print(json.dumps(seen))
        assert seen["left"].keys() >= PHASES - {"half a pointer"}


@contextmanager
def noted(note: Callable[[str, str], None]) -> Iterator[None]:
    """Have calls that write, synchronise or rename tell `note` what they do to which path, when they have done it."""

    def path_of(at: Any) -> str:
        return os.readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else str(at)

    def noting(what: str, really: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            folder = kwargs.get("dst_dir_fd")
            to = args[1] if what == "rename" else args[0]
            path = path_of(to) if folder is None else f"{path_of(folder)}/{to}"
            done = really(*args, **kwargs)
            note(what, path)
            return done

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, what in (("pwritev", "write"), ("fsync", "sync"), ("rename", "rename")):
            patch.setattr(os, name, noting(what, getattr(os, name)))
        yield


def small() -> tuple[dzero.Sharded, AdamW]:
    sharded = dzero.shard(nn.Linear(2, 2), stage=1, precision="fp32")
    return sharded, AdamW(sharded)


def calls_of(rank: int, ranks: int, folder: Path) -> list[tuple[float, str, str]]:
    """Save twice; when each call had returned, what it did, and to which path; many alike in a row are one."""
    calls: list[tuple[float, str, str]] = []

    def note(what: str, path: str) -> None:
        if not calls or calls[-1][1:] != (what, path):
            calls.append((time.monotonic(), what, path))

    with noted(note), Checkpointer(CheckpointConfig(folder=str(folder), keep=1), *small()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {}, {"a": torch.arange(60_000) * step})
        checkpoints.finish()
    return calls


def test_everything_is_on_disk_before_what_names_it(pool: Pool, tmp_path: Path) -> None:
    """Two ranks save twice into a new folder, keep=1."""
    shelf = tmp_path / "new" / "shelf"
    ranks = pool.run(calls_of, 2, shelf)

    def file(path: str, name: str) -> list[tuple[str, str]]:
        return [("sync", f"{path}/{name}.partial"), ("rename", f"{path}/{name}"), ("sync", path)]

    def own(step: str, rank: int) -> list[tuple[str, str]]:
        data = f"{shelf}/{step}.partial/rank_0000{rank}.safetensors"
        return [("write", data), ("sync", data), *file(f"{shelf}/{step}.partial", f"rank_0000{rank}.json")]

    def together(step: str) -> list[tuple[str, str]]:
        named = [("rename", f"{shelf}/{step}"), ("sync", str(shelf))]
        return file(f"{shelf}/{step}.partial", "manifest.json") + named + file(str(shelf), "latest.json")

    first, second = "step_00000001", "step_00000002"
    calls = [[(what, path) for _, what, path in each] for each in ranks]
    made = [("sync", str(tmp_path)), ("sync", f"{tmp_path}/new"), ("sync", f"{shelf}/.lock")]
    removed = [("rename", f"{shelf}/{first}.going"), ("sync", str(shelf))]
    assert calls[0] == made + own(first, 0) + together(first) + own(second, 0) + together(second) + removed
    assert calls[1] == own(first, 1) + own(second, 1)
    for step, last in ((first, len(calls[1]) // 2 - 1), (second, -1)):
        manifest = calls[0].index(("sync", f"{shelf}/{step}.partial/manifest.json.partial"))
        assert ranks[1][last][0] < ranks[0][manifest][0]  # the other rank's all, before rank 0 says that it is there
    assert names(shelf) == [second]


def changed_at_once(rank: int, ranks: int, folder: Path) -> list[str]:
    """What differs from the states at the time of the save, which change as soon as it returns."""
    sharded = sharded_net(stage=3, param="fp32")
    optim = AdamW(sharded)
    with Checkpointer(CheckpointConfig(folder=str(folder), staging_bytes=1 << 20), sharded, optim) as checkpoints:
        before, own = params_of(sharded), torch.arange(300_000)
        checkpoints.save(1, {}, {"own": own})
        own.zero_()
        train(sharded, optim, steps=1)
        assert unequal(before, params_of(sharded)) != []
        resumed = checkpoints.resume("auto")
        assert resumed is not None
        assert resumed.local is not None
        assert raw(resumed.local["own"]) == raw(torch.arange(300_000))
        return unequal(before, params_of(sharded))


def test_what_was_saved_may_change_at_once(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(changed_at_once, 2, tmp_path / "checkpoints") == [[], []]


TIMEOUT_S = 1.5


def waiting(rank: int, ranks: int, folder: Path) -> Told:
    """Saves in a group with a short timeout, of which rank 1 is slow, then fails, then does not come."""
    dist.destroy_process_group()
    store = dist.FileStore(str(folder / "store"), ranks)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    seen: Told = {}

    def late(what: str, path: str) -> None:
        if rank == 1 and what == "sync" and path.endswith("1.partial/rank_00001.safetensors"):
            time.sleep(2 * TIMEOUT_S)
        if rank == 1 and what == "sync" and path.endswith("2.partial/rank_00001.safetensors"):
            raise OSError("no such disk")

    mesh = dzero.make_mesh("cpu")
    sharded = dzero.shard(nn.Linear(2, 2), stage=1, precision="fp32", mesh=mesh)
    with noted(late), Checkpointer(CheckpointConfig(folder=str(folder / "shelf")), sharded, AdamW(sharded)) as saves:
        for step in (1, 2, 3):
            try:
                saves.save(step, {})
                seen[f"save {step}"] = saves.finish()
            except CheckpointError as error:
                seen[f"save {step}"] = str(error)
        dist.barrier()
        if rank == 1:
            time.sleep(3 * TIMEOUT_S)
        else:
            with pytest.raises(CheckpointError) as gone:
                saves.save(4, {})
            seen["hung"] = str(gone.value)
            with pytest.raises(RuntimeError):
                dist.barrier(group=mesh.get_group("shard"))
            saves.__exit__(RuntimeError, None, None)
    return seen


def test_ranks_wait_for_a_slow_one_are_told_of_a_failure_and_miss_one_that_is_gone(pool: Pool, tmp_path: Path) -> None:
    """Twice the timeout of a collective is no hang while the rank says that it is busy; silence for that long is."""
    first, second = pool.run(waiting, 2, tmp_path)
    assert first["save 1"] == second["save 1"] == "step_00000001"
    assert all("rank_00001" in told and "no such disk" in told for told in (first["save 2"], second["save 2"]))
    assert first["save 3"] == second["save 3"] == "step_00000003"
    assert first["hung"].startswith(f"{tmp_path}/shelf: a rank is gone: ")


def faster_than_written(rank: int, ranks: int, folder: Path) -> None:
    """Save two steps, while rank 0 takes long between what ranks agree on."""

    def late(what: str, path: str) -> None:
        if rank == 0 and path.endswith("manifest.json.partial"):
            time.sleep(1.0)

    with noted(late), Checkpointer(CheckpointConfig(folder=str(folder)), *small()) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {})
            time.sleep(0.5)  # the other rank is through with the first, unless rank 0 must tell it something


def test_what_a_save_asks_the_ranks_waits_for_the_save_before(pool: Pool, tmp_path: Path) -> None:
    """Else what one rank asks for the second save meets what another does for the first."""
    pool.run(faster_than_written, 2, tmp_path / "shelf")
    assert names(tmp_path / "shelf") == ["step_00000001", "step_00000002"]
    assert command("inspect", tmp_path / "shelf", "--verify").returncode == 0
